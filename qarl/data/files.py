"""Local .json, .jsonl, .parquet and .csv files, and directories of them.

Does not use `datasets`, because its Arrow JSON reader merges objects of different rows into one struct, its
errors do not name the line, and it copies what it reads into a cache.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qarl.data.values import NotPlain, Row, plain
from qarl.errors import UserError
from qarl.inputs.files import LINE_BYTES, Unreadable, read_lines, read_text
from qarl.inputs.json import json_kind, parse_json
from qarl.inputs.paths import path_errors
from qarl.utils.text import visible

if TYPE_CHECKING:
    import pyarrow

FILE_BYTES = 8 * 2**30  # limit for .json, .csv and the decoded .parquet, which are read as a whole
ENTRIES = 1_000_000  # limit for the files in a directory tree
COLUMNS = 1000  # limit, because every row has every column

# A path that mentions none of these belongs to the split `train`: the hub's own rule for a directory of data files.
_SPLIT_WORDS = {"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"}
_METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


def read_file(path: Path) -> list[Row]:
    """Read all rows of one file, whose suffix determines the format. For the types of CSV cells see `_read_csv`.

    Values that JSON cannot represent are converted, see `values.plain`. Raises UserError with the file, and with the
    line for line-based formats.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"data.source: {path}: unknown file type `{path.suffix}`; known are {', '.join(READERS)}")
    try:
        return _same_keys(reader(path), path)
    except Unreadable as error:
        raise UserError(f"data.source: {visible(str(error))}") from error


def read_directory(directory: Path, split: str) -> list[Row]:
    """Read the rows of a split of a directory. Raises UserError like `split_files` and `read_file`."""
    return _same_keys([row for path in split_files(directory, split) for row in read_file(path)], directory)


def split_files(directory: Path, split: str) -> list[Path]:
    """Return the data files under `directory` whose relative path contains `split` as a word, sorted by path.

    As on the hub, files that mention no split are `train`. Raises UserError if the split does not exist, or exists in
    two formats.
    """
    found: dict[str, list[Path]] = {}
    with path_errors(f"data.source: {directory}"):
        entries = list(islice(directory.rglob("*"), ENTRIES + 1))
        if len(entries) > ENTRIES:
            raise UserError(f"data.source: {directory}: holds more than {ENTRIES:,} files; name a directory below it")
        paths = sorted(path for path in entries if path.is_file())
    for path in paths:
        relative = path.relative_to(directory)
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or path.name in _METADATA or path.suffix.lower() not in READERS:
            continue
        words = re.split(r"[^a-z0-9]+", relative.with_suffix("").as_posix().lower())
        names = [word for word in words if word in _SPLIT_WORDS or word == split.lower()]
        found.setdefault(names[-1] if names else "train", []).append(path)
    if not found:
        hint = "; save_to_disk wrote it: use to_parquet" if any(path.suffix == ".arrow" for path in paths) else ""
        raise UserError(f"data.source: no {', '.join(READERS)} file in {directory}{hint}")
    if split.lower() not in found:
        raise UserError(f"data.split: no `{split}` in {directory}; there are: {', '.join(sorted(found))}")
    paths = found[split.lower()]
    suffixes = sorted({path.suffix.lower() for path in paths})
    if len(suffixes) > 1:
        raise UserError(
            f"data.source: split `{split}` of {directory} exists as {' and '.join(suffixes)}; give the path of one file"
        )
    return paths


def _same_keys(rows: list[Row], place: Path) -> list[Row]:
    keys: dict[str, None] = {}
    for row in rows:
        keys.update(dict.fromkeys(row))
        if len(keys) > COLUMNS:
            raise UserError(f"data.source: {place}: has more than {COLUMNS:,} columns; leave out what is not needed")
    return [{key: row.get(key) for key in keys} for row in rows]


def _read_json(path: Path) -> list[Row]:
    """Read a list of objects, or one object per line."""
    try:
        value = parse_json(read_text(path, FILE_BYTES), str(path), big_integers=True, nonfinite=True)
    except Unreadable as error:
        if "Extra data" in error.reason:  # one object per line, as `Dataset.to_json` writes
            return _read_jsonl(path)
        raise UserError(f"data.source: {visible(str(error))}") from error
    if not isinstance(value, list):
        raise UserError(f"data.source: {path}: holds {json_kind(value)}, expected a list of objects")
    for index, row in enumerate(value):
        if not isinstance(row, dict):
            raise UserError(f"data.source: {path}: element {index} is {json_kind(row)}, expected an object")
    return value


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    for number, line in read_lines(path):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            row = parse_json(line, f"{path} line {number}", big_integers=True, nonfinite=True)
        except Unreadable as error:  # the parser saw one line, so its line number is always 1
            reason = error.reason.replace("(line 1 column", "(column", 1).replace("(line 1, byte", "(byte", 1)
            raise Unreadable(f"{path} line {number}", reason) from None
        if not isinstance(row, dict):
            raise UserError(f"data.source: {path} line {number}: is {json_kind(row)}, expected an object")
        rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow  # takes a second to import; only this format needs it
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)]
            if sum(groups) > FILE_BYTES:
                raise UserError(f"data.source: {path}: holds more than {FILE_BYTES:,} bytes; split it")
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise UserError(f"data.source: {path}: a column name appears twice in {visible(', '.join(names))}")
            rows = table_rows(file.read())
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        # ValueError and OverflowError: text that is not UTF-8, and times outside Python's range
        said = visible(" ".join(str(error).split())[:300])
        raise UserError(f"data.source: {path}: not a readable Parquet file ({said})") from error
    return plain_rows(rows, f"data.source: {path}")


def table_rows(table: pyarrow.Table) -> list[Row]:
    """Return the rows of a table. float32 becomes the shortest decimal that rounds to it: 0.1, not 0.10000000149."""
    import pyarrow

    for index, field in enumerate(table.schema):
        text, double = (_floats_as(kind, field.type) for kind in (pyarrow.string(), pyarrow.float64()))
        if text != field.type:
            table = table.set_column(index, field.name, table.column(index).cast(text).cast(double))
    return table.to_pylist()


def _floats_as(kind: pyarrow.DataType, of: pyarrow.DataType) -> pyarrow.DataType:
    """Return the type `of` with float32 replaced by `kind`, also within lists and structs."""
    from pyarrow import list_, struct, types

    if types.is_list(of):
        return list_(_floats_as(kind, of.value_type))
    if types.is_struct(of):
        return struct([(field.name, _floats_as(kind, field.type)) for field in of])
    return kind if types.is_float32(of) else of


def plain_rows(rows: list[Row], place: str) -> list[Row]:
    """Convert rows to JSON values, see `values.plain`. Raises UserError with row and column."""
    found = []
    for index, row in enumerate(rows):
        values = {}
        for name, value in row.items():
            try:
                values[name] = plain(value)
            except NotPlain as error:
                raise UserError(f"{place}: row {index}: column `{visible(str(name))}` {error}") from error
        found.append(values)
    return found


def _read_csv(path: Path) -> list[Row]:
    """Read the rows below the header line. A column is int or float only if every cell round-trips exactly.

    So `19` is a number, but a column with `007` or `3.10` stays text, because rewards may compare the spelling.
    """
    rows: list[list[str]] = []
    csv.field_size_limit(LINE_BYTES)  # process-wide; the default is 131,072 characters
    reader = csv.reader(io.StringIO(read_text(path, FILE_BYTES), newline=""), strict=True)
    try:
        header = next(reader, [])
        if len(header) > COLUMNS:
            raise UserError(f"data.source: {path} line 1: has more than {COLUMNS:,} columns")
        if len(set(header)) < len(header):
            names = visible(", ".join(header))
            raise UserError(f"data.source: {path} line 1: a column name appears twice in {names:.300}")
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
