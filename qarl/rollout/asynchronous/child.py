"""`python -m qarl.rollout.asynchronous.child FD NUMERICS BEGUN LEARNER`: the entry point of the sampler's process.

It asks the kernel to be killed when the process LEARNER ends, before any slow import. `host.py` does the rest.
"""

from __future__ import annotations

import signal
import sys

from qarl.utils.signals import signal_at_end_of


def main() -> None:
    descriptor, _, _, learner = sys.argv[1:]
    signal_at_end_of(int(learner), signal.SIGKILL)
    from qarl.rollout.asynchronous import host

    host.main(int(descriptor))


if __name__ == "__main__":
    main()
