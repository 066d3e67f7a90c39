"""JSON-lines files that a kill can only cut short, and what they say after one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from qarl.storage.disk import atomic_write_text, disk_errors

Row = dict[str, Any]


def to_line(row: Row) -> str:
    """Strict JSON in ASCII, newline included: hostile text, lone surrogates too, is escaped."""
    return json.dumps(row, allow_nan=False, default=str) + "\n"


def read_rows(path: Path) -> list[Row]:
    """The objects of a JSON-lines file, up to the first line that is none: there a kill cut the file short."""
    rows: list[Row] = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                break
            if not isinstance(row, dict):
                break
            rows.append(row)
    return rows


def append_rows(path: Path, rows: Iterable[Row], place: str) -> None:
    """Append durably. Raises UserError if the disk refuses, and takes a part that was written back."""
    text = "".join(map(to_line, rows)).encode()
    with disk_errors(path, len(text), place), open(path, "ab", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        try:
            written = 0
            while written < len(text):
                written += file.write(text[written:])
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):  # the first error is the one to report; `read_rows` copes with a torn line
                file.truncate(end)
            raise


def keep_rows(path: Path, wanted: Callable[[Row], bool], place: str) -> list[Row]:
    """Drop the rows that are not wanted and a torn end from a file, atomically. Returns what is left."""
    rows = [row for row in read_rows(path) if wanted(row)]
    if path.exists():
        text = "".join(map(to_line, rows))
        if text.encode() != path.read_bytes():
            with disk_errors(path, len(text), place):
                atomic_write_text(path, text)
    return rows
