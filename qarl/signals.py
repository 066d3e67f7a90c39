"""Signals of a process that passes them on."""

from __future__ import annotations

import signal


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
