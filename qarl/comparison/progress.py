"""Progress of a comparison: step and reward of each training member, from its metrics.jsonl.

A terminal gets one line that is updated. A pipe gets a line when a member starts and ends, and progress lines at most
every `QUIET_SECONDS`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TextIO

from rich.status import Status
from rich.text import Text

from qarl.comparison.plan import Member
from qarl.inputs.files import Unreadable, open_regular
from qarl.report.formatting import number, seconds
from qarl.storage.runs import Metrics, parse_record
from qarl.terminal.console import Console
from qarl.utils.text import visible

QUIET_SECONDS = 60.0
_TAIL_BYTES = 2**16  # more than the last two lines of any metrics.jsonl


class ProgressView:
    """Shows the progress of members. A context manager, which restores the terminal."""

    def __init__(self, members: list[Member], stream: TextIO | None = None) -> None:
        self._waiting = [member.name for member in members if member.state == "waiting"]
        self._console = Console(stream, soft_wrap=True)
        self._status: Status | None = None
        self._began: dict[str, float] = {}  # start time by name of training members
        self._last_output = time.monotonic()

    def __enter__(self) -> ProgressView:
        return self

    def __exit__(self, *exc: object) -> None:
        self._clear()

    def say(self, text: str) -> None:
        """Print one line, with control characters escaped."""
        self._console.print(Text(visible(text)))

    def started(self, member: Member) -> None:
        self._began[member.name] = self._last_output = time.monotonic()
        if not self._console.is_terminal:
            self.say(f"{self._position(member)} starts")
        elif self._status is None:
            self._status = self._console.status(Text(f"{self._position(member)} starts"))
            self._status.start()

    def progress(self, members: list[Member]) -> None:
        """Show the members in training; called several times per second."""
        if self._status is not None:
            self._status.update(Text("\n".join(map(self._line, members))))
        elif time.monotonic() - self._last_output >= QUIET_SECONDS:
            self._last_output = time.monotonic()
            for member in members:
                self.say(self._line(member))

    def ended(self, member: Member) -> None:
        self.say(f"{self._line(member)}, {member.state}" + (f": {member.reason}" if member.reason else ""))
        del self._began[member.name]
        if not self._began:
            self._clear()

    def _clear(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _position(self, member: Member) -> str:
        return f"[{self._waiting.index(member.name) + 1}/{len(self._waiting)}] {member.name}"

    def _line(self, member: Member) -> str:
        assert member.config is not None
        record = last_record(member.run_dir / "metrics.jsonl") or {}
        reward = f", reward {number(record['reward/mean'])}" if record.get("reward/mean") is not None else ""
        step = f"step {record.get('step', 0)}/{member.config.train.steps}"
        return f"{self._position(member)}: {step}{reward}, {seconds(time.monotonic() - self._began[member.name])}"


def last_record(path: Path) -> dict | None:
    """Return the last complete record of a metrics.jsonl that may be growing; None if there is none yet."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines()
    except (Unreadable, OSError):  # no file yet, or a modified directory, which the member itself reports
        return None
    # The last line may be incomplete, and the first one lacks its beginning.
    return next((record for line in reversed(lines) if (record := parse_record(line, Metrics)) is not None), None)
