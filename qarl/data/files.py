"""Local .json, .jsonl, .parquet and .csv files, and directories of them.

Read here rather than through `datasets`: its Arrow JSON reader merges objects of different rows into one struct, its
errors do not name the line, and it copies what it reads into a cache.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qarl.errors import UserError

Row = dict[str, Any]

# A path that mentions none of these belongs to the split `train`: the hub's own rule for a directory of data files.
_SPLIT_WORDS = {"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"}
_METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


def read_file(path: Path) -> list[Row]:
    """All rows of one file; its suffix says the format. Types are the file's own; for CSV see `_read_csv`.

    Raises UserError naming the file, and the line where the format has lines.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"data.source: {path}: unknown file type `{path.suffix}`; known are {', '.join(READERS)}")
    try:
        rows = reader(path)
    except UnicodeDecodeError as error:
        raise UserError(f"data.source: {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise UserError(f"data.source: {path}: cannot be read ({error.strerror or error})") from error
    return _same_keys(rows)


def read_directory(directory: Path, split: str) -> list[Row]:
    """Rows of all files under `directory` whose relative path has `split` as a word, in the order of their paths.

    As on the hub, files that mention no split are `train`. Raises UserError when the split is missing or is there in
    two formats.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        hidden = any(part.startswith(".") for part in relative.parts)
        if not path.is_file() or hidden or path.name in _METADATA or path.suffix.lower() not in READERS:
            continue
        words = re.split(r"[^a-z0-9]+", relative.with_suffix("").as_posix().lower())
        names = [word for word in words if word in _SPLIT_WORDS or word == split.lower()]
        found.setdefault(names[-1] if names else "train", []).append(path)
    if not found:
        raise UserError(f"data.source: no {', '.join(READERS)} file in {directory}")
    if split.lower() not in found:
        raise UserError(f"data.split: no `{split}` in {directory}; there are: {', '.join(sorted(found))}")
    paths = found[split.lower()]
    suffixes = sorted({path.suffix.lower() for path in paths})
    if len(suffixes) > 1:
        raise UserError(f"data.source: split `{split}` of {directory} is there as {' and '.join(suffixes)}; name one")
    return _same_keys([row for path in paths for row in read_file(path)])


def _same_keys(rows: list[Row]) -> list[Row]:
    keys: dict[str, None] = {}
    for row in rows:
        keys.update(dict.fromkeys(row))
    return [{key: row.get(key) for key in keys} for row in rows]


def _read_json(path: Path) -> list[Row]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        hint = "; one object a line is .jsonl" if error.msg == "Extra data" else ""
        raise UserError(
            f"data.source: {path} line {error.lineno} column {error.colno}: not valid JSON ({error.msg}){hint}"
        ) from error
    if not isinstance(value, list):
        raise UserError(f"data.source: {path}: holds one {type(value).__name__}, expected a list of objects")
    for index, row in enumerate(value):
        if not isinstance(row, dict):
            raise UserError(f"data.source: {path}: element {index} is {type(row).__name__}, expected an object")
    return value


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"data.source: {path} line {number} column {error.colno}: not valid JSON ({error.msg})"
                ) from error
            if not isinstance(row, dict):
                raise UserError(f"data.source: {path} line {number}: is {type(row).__name__}, expected an object")
            rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow  # a second to import, and only this format needs it
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"data.source: {path}: not a readable Parquet file ({str(error).splitlines()[0]})") from error


def _read_csv(path: Path) -> list[Row]:
    """Rows under the header line. A column is int or float only if every cell reads back as it was written.

    So `19` is a number, but a column with `007` or `3.10` stays text: the answer is compared as the file has it.
    """
    rows: list[list[str]] = []
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise UserError(f"data.source: {path} line 1: a column name appears twice in {', '.join(header)}")
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise UserError(
                        f"data.source: {path} line {reader.line_num}: {len(cells)} cells, the header has {len(header)}"
                    )
                rows.append(cells)
        except csv.Error as error:
            raise UserError(f"data.source: {path} line {reader.line_num}: not valid CSV ({error})") from error
    columns = [_typed(list(column)) for column in zip(*rows, strict=True)]
    return [dict(zip(header, cells, strict=True)) for cells in zip(*columns, strict=True)]


def _typed(cells: list[str]) -> list[Any]:
    for kind in (int, float):
        try:
            values = [kind(cell) for cell in cells]
        except ValueError:
            continue
        if all(str(value) == cell for value, cell in zip(values, cells, strict=True)):
            return values
    return cells


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
