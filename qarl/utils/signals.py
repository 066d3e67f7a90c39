"""Signals that ask a process to stop: the exceptions they raise, and passing them on to child processes.

SIGHUP, which a closed terminal sends, is one of them unless it is ignored already, as under `nohup`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Interrupted(BaseException):
    """A signal asked for a safe stop. `exit_code` is 128 + the signal's number, as in a shell.

    Not an Exception, like KeyboardInterrupt, so that a broad `except Exception` in a library does not swallow it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


class StoppedAtOnce(KeyboardInterrupt):
    """A second Ctrl-C: stop now, without saving. A KeyboardInterrupt of another class comes from user code."""


def is_stop(error: BaseException) -> bool:
    """Whether `error` asks for the process to stop, so that code which catches every exception must re-raise it."""
    return isinstance(error, (Interrupted, KeyboardInterrupt))


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask for a safe stop: SIGINT, SIGTERM, and SIGHUP unless this process ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def signal_name(number: int) -> str:
    """Return a name such as `SIGKILL`; real-time signals only have a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Signals:
    """Context manager: records stop signals instead of stopping, so that they can be forwarded to child processes.

    Attributes:
        received: Signal numbers in order of arrival.
    """

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> Signals:
        note = lambda signum, frame: self.received.append(signum)  # noqa: E731
        self._previous = {signum: signal.signal(signum, note) for signum in stop_signals()}
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)


def signal_at_end_of(parent: int, signum: int) -> None:
    """Have the kernel send `signum` to this process when its parent ends for any reason.

    The end of the thread that started this process counts as the parent's end. parent: its pid. If the parent is gone
    already, this process ends with exit code 1.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def signal_at_end_of_pipe(read: int, signum: int) -> None:
    """Have the kernel send `signum` to this process when the only writer of a pipe, its parent, ends for any reason.

    Unlike with `signal_at_end_of`, the end of the thread that started this process does not count. Unlike a watchdog
    thread, it works while other code holds the GIL. The kernel notifies one process per pipe. If the parent is gone
    already, this process ends with exit code 1.

    Args:
        read: The read end of the pipe.
        signum: The signal.
    """
    os.set_inheritable(read, False)
    fcntl.fcntl(read, fcntl.F_SETSIG, signum)
    fcntl.fcntl(read, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([read], [], [], 0)[0]:  # it ended before the call
        os._exit(1)
