"""JSON-lines files that a kill can only cut short, and what they say after one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from qarl.inputs.files import NoSuchFile, Unreadable, read_lines
from qarl.inputs.json import parse_json, strict
from qarl.inputs.schema import checked
from qarl.storage.disk import atomic_write_text, disk_errors

Row = dict[str, Any]


def to_line(row: Row) -> str:
    """Strict JSON in ASCII, newline included: hostile text, lone surrogates too, is escaped; an infinity is null."""
    return json.dumps(strict(row), allow_nan=False, default=str) + "\n"


def read_rows(path: Path, model: type[BaseModel]) -> list[Row]:
    """The rows of a JSON-lines file, which hold what `model` wants; a last line that a kill cut short is left out.

    No file: no rows. Raises Unreadable for any other line that is no such row.
    """
    try:
        lines = list(read_lines(path))
    except NoSuchFile:
        return []
    rows: list[Row] = []
    for number, line in lines:
        place = f"{path} line {number}"
        try:
            row = parse_json(line, place, surrogates=True)
            checked(model, row, place)
        except Unreadable as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise Unreadable(place, f"{error.reason}; restore the file, or remove that line") from None
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


def keep_rows(path: Path, model: type[BaseModel], wanted: Callable[[Row], bool], place: str) -> list[Row]:
    """Drop the rows that are not wanted and a torn end from a file, atomically. Returns what is left.

    Raises Unreadable as `read_rows` does, and UserError if the disk refuses.
    """
    rows = [row for row in read_rows(path, model) if wanted(row)]
    if path.exists():
        text = "".join(map(to_line, rows))
        if text.encode() != b"".join(line for _, line in read_lines(path)):
            with disk_errors(path, len(text), place):
                atomic_write_text(path, text)
    return rows
