"""`python -m qarl.rollout.vllm.child FD NUMERICS BEGUN LEARNER`: the sampler's own process.

Before it imports anything that takes long it sees to it that it never outlives the learner, the process LEARNER. The
rest is for `worker.py`.
"""

from __future__ import annotations

import signal
import sys

from qarl.signals import signal_at_end_of


def main() -> None:
    descriptor, numerics, begun, learner = sys.argv[1:]
    signal_at_end_of(int(learner), signal.SIGKILL)
    from qarl.rollout.vllm import worker

    worker.main(int(descriptor), numerics, float(begun))


if __name__ == "__main__":
    main()
