"""`python -m qarl.rollout.vllm.child FD NUMERICS BEGUN LEARNER`: the sampler's own process.

It asks the kernel to be killed when the process LEARNER ends, before any slow import. `worker.py` does the rest.
"""

from __future__ import annotations

import signal
import sys

from qarl.utils.signals import signal_at_end_of


def main() -> None:
    descriptor, numerics, begun, learner = sys.argv[1:]
    signal_at_end_of(int(learner), signal.SIGKILL)
    from qarl.rollout.vllm import worker

    worker.main(int(descriptor), numerics, float(begun))


if __name__ == "__main__":
    main()
