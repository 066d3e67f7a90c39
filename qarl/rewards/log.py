"""`rewards.log`: output and failures of reward functions, with bounded size.

Beyond FILE_BYTES the file is renamed to `rewards.log.1`, replacing an older one, and a new file begins.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from qarl.utils.text import visible

FILE_BYTES = 32 * 2**20  # per file; there are at most two
CALL_BYTES = 2**20  # per function call, and for loading all functions


class RewardLog:
    """Append-only log of reward functions.

    Several logs with the same path in one process share the file. Write errors are ignored: the run itself reports a
    full disk.

    Args:
        path: The file, created on the first write. None: stderr of this process, with control characters escaped.
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
    """Logging handler that writes records as lines of a `RewardLog`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._log = RewardLog(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write((self.format(record) + "\n").encode("utf-8", "backslashreplace"))


class Output:
    """Output of one worker: copied to the log, up to CALL_BYTES per call. Remembers the last line."""

    def __init__(self, log: RewardLog) -> None:
        self.log = log
        self._tail = b""
        self._room = CALL_BYTES
        self._lost = 0

    def begin(self) -> None:
        """Start a new call, which resets the limit."""
        if self._lost:
            self.log.write(f"\n[{self._lost:,} bytes of output of a reward function omitted]\n".encode())
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
        """Last non-blank line of this call, escaped and shortened; empty if nothing was printed."""
        lines = [line for line in self._tail.decode("utf-8", "replace").splitlines() if line.strip()]
        return visible(lines[-1].strip())[-300:] if lines else ""
