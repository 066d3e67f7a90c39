"""Signals that a process passes on to those that it started, and the one that tells them that it is gone."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Signals:
    """While entered, SIGINT and SIGTERM are counted, for the processes that one has started to be sent as many."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> Signals:
        note = lambda signum, frame: self.received.append(signum)  # noqa: E731
        self._previous = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)


def signal_at_end_of(parent: int, signum: int) -> None:
    """Have the kernel send this process `signum` when its parent is gone, however that ended.

    parent: its pid. Where it is gone already, this process ends with exit code 1. The end of the thread that started
    this process counts as the parent's.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it was gone before the kernel was asked
        os._exit(1)
