"""The process of one member: `qarl train`, which saves and stops if its comparison is gone."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys


def main(lifeline_fd: int, argv: list[str]) -> None:
    """Run the `qarl` command line `argv`. lifeline_fd: read end of a pipe whose only writer is the comparison."""
    stop_with_parent(lifeline_fd)
    sys.argv = ["qarl", *argv]  # what environment.json records
    from qarl.cli import main as qarl

    qarl(argv)


def stop_with_parent(lifeline_fd: int) -> None:
    """Have the kernel send SIGTERM when the parent ends for any reason, so that the run saves and stops.

    Like `qarl.rewards.worker.die_with_parent`, but with a signal after which a run can write a checkpoint.
    """
    os.set_inheritable(lifeline_fd, False)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline_fd], [], [], 0)[0]:  # it ended before the call
        os._exit(1)
