"""`rewards.log`: what reward functions print and each of their failures, within a bound.

Past FILE_BYTES the file becomes `rewards.log.1`, in place of an older one, and a new one begins: the latest is kept.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from qarl.utils.text import visible

FILE_BYTES = 32 * 2**20  # of each of the two files
CALL_BYTES = 2**20  # of what one call of a function, or the loading of all, prints


class RewardLog:
    """path: the file, made when there is something to write; None: the standard error of this process, escaped.

    Several logs of one path, in one process, are one file. What the disk does not take is lost without a word: the run
    itself will have to say that the disk is full.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def write(self, data: bytes) -> None:
        if self.path is None:
            print(visible(data.decode("utf-8", "replace"), keep_newlines=True), end="", file=sys.stderr, flush=True)
            return
        with suppress(OSError):
            if self.path.exists() and self.path.stat().st_size + len(data) > FILE_BYTES:
                os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            with self.path.open("ab", buffering=0) as file:
                file.write(data)


class RewardLogHandler(logging.Handler):
    """Log records as lines of a `RewardLog`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._log = RewardLog(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write((self.format(record) + "\n").encode("utf-8", "backslashreplace"))


class Output:
    """What one worker prints: into the log, up to CALL_BYTES a call; the last line is remembered."""

    def __init__(self, log: RewardLog) -> None:
        self.log = log
        self._tail = b""
        self._room = CALL_BYTES
        self._lost = 0

    def begin(self) -> None:
        """A call begins, and may print as much as any."""
        if self._lost:
            self.log.write(f"\n[{self._lost:,} bytes more that a call of a reward printed are left out]\n".encode())
        self._room, self._lost, self._tail = CALL_BYTES, 0, b""

    def take(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-1000:]
        kept = data[: self._room]
        if kept:
            self.log.write(kept)
        self._room -= len(kept)
        self._lost += len(data) - len(kept)

    @property
    def last_line(self) -> str:
        """The last line that is not blank, escaped and shortened; empty if nothing was printed in this call."""
        lines = [line for line in self._tail.decode("utf-8", "replace").splitlines() if line.strip()]
        return visible(lines[-1].strip())[-300:] if lines else ""
