"""`qarl` in a process that another `qarl` started: a rank, or a member of a comparison. It stops with its parent."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys

from qarl.utils.signals import signal_at_end_of


def run_rank(launcher: int, argv: list[str]) -> None:
    """Run the `qarl` command line `argv` as a rank of `qarl train --nproc`. launcher: pid of the parent."""
    signal_at_end_of(launcher, signal.SIGTERM)  # a run then saves and stops
    _run(argv)


def run_member(lifeline_fd: int, argv: list[str]) -> None:
    """Run the `qarl` command line `argv` as a member of a comparison.

    lifeline_fd: read end of a pipe whose only writer is the parent.
    """
    stop_with_parent(lifeline_fd)
    _run(argv)


def _run(argv: list[str]) -> None:
    sys.argv = ["qarl", *argv]  # what environment.json records
    from qarl.cli import main

    main(argv)


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
