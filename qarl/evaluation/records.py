"""Durable JSON-lines files: a kill can only truncate the last line, and readers ignore a truncated line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from qarl.evaluation.results import Row
from qarl.inputs.files import NoSuchFile, Unreadable, read_lines
from qarl.inputs.json import parse_json, strict
from qarl.inputs.schema import checked
from qarl.storage.disk import atomic_write_text, disk_errors


def to_line(row: Row) -> str:
    """Strict ASCII JSON with newline. Escapes all other text, including lone surrogates; infinities become null."""
    return json.dumps(strict(row), allow_nan=False, default=str) + "\n"


def read_rows(path: Path, model: type[BaseModel]) -> list[Row]:
    """Read the rows of a JSON-lines file. A truncated last line is ignored; a missing file has no rows.

    Raises:
        Unreadable: Any other line does not match `model`.
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
            raise Unreadable(place, f"{error.reason}; restore the file, or remove this line") from None
        rows.append(row)
    return rows


def append_rows(path: Path, rows: Iterable[Row], place: str) -> None:
    """Append rows durably. On a write error, remove what was written, and raise UserError."""
    text = "".join(map(to_line, rows)).encode()
    with disk_errors(path, len(text), place), open(path, "ab", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        try:
            written = 0
            while written < len(text):
                written += file.write(text[written:])
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):  # report the first error; `read_rows` ignores a truncated line
                file.truncate(end)
            raise


def keep_rows(path: Path, model: type[BaseModel], wanted: Callable[[Row], bool], place: str) -> list[Row]:
    """Remove unwanted rows and a truncated last line from a file, atomically.

    Returns:
        The remaining rows.

    Raises:
        Unreadable: As `read_rows`.
        UserError: The file cannot be written.
    """
    rows = [row for row in read_rows(path, model) if wanted(row)]
    if path.exists():
        text = "".join(map(to_line, rows))
        if text.encode() != b"".join(line for _, line in read_lines(path)):
            with disk_errors(path, len(text), place):
                atomic_write_text(path, text)
    return rows
