"""SIGINT and SIGTERM: end at the next safe point with a checkpoint; a second SIGINT ends at once."""

from __future__ import annotations

import signal
from collections.abc import Callable


class Interrupted(Exception):
    """Raised at a safe point after a signal; `exit_code` is the shell's, 128 + the signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


class InterruptGuard:
    """While entered, the first SIGINT or SIGTERM is only noted; `check` raises `Interrupted` where stopping is safe.

    A second SIGINT raises KeyboardInterrupt wherever the program is. say: gets one line at the first signal.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.signum: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> InterruptGuard:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: object) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signum is None:
            self.signum = signum
            self.say(f"{signal.Signals(signum).name}: saving a checkpoint at the next safe point; Ctrl-C stops at once")

    def check(self) -> None:
        """Raise `Interrupted` if a signal came."""
        if self.signum is not None:
            raise Interrupted(self.signum)
