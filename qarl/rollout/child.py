"""`python -m qarl.rollout.child FD NUMERICS BEGUN LEARNER`: entry point of the sampler's process.

FD is the connection to the learner, NUMERICS is `exact` or `fast` for vLLM and `native` for the native engine, BEGUN
the start time by `time.monotonic()`, and LEARNER the learner's process id. The process first asks the kernel to kill it
when the learner ends, because the imports that follow take seconds.
"""

from __future__ import annotations

import signal
import sys

from qarl.utils.signals import signal_at_end_of


def main() -> None:
    descriptor, numerics, begun, learner = sys.argv[1:]
    signal_at_end_of(int(learner), signal.SIGKILL)
    if numerics == "native":
        from qarl.rollout.asynchronous import host

        host.main(int(descriptor))
    else:
        from qarl.rollout import vllm_worker as worker

        worker.main(int(descriptor), numerics, float(begun))


if __name__ == "__main__":
    main()
