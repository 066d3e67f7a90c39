"""Tensors in a model's safetensors files, read from headers only. Imports no torch and reads no weights.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, RootModel

from qarl.errors import UserError
from qarl.inputs.files import TEXT_BYTES, NoSuchFile, Unreadable, read_prefix
from qarl.inputs.json import parse_json, read_json_object
from qarl.inputs.schema import FileName, Record, checked

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "C64": 64,
}
_Size = Annotated[int, Field(ge=0, lt=2**48)]


class _Entry(Record):
    dtype: str
    shape: Annotated[list[_Size], Field(max_length=8)]
    data_offsets: Annotated[list[_Size], Field(min_length=2, max_length=2)]


class _Header(RootModel[dict[str, _Entry]]):
    pass


class _Index(Record):
    weight_map: dict[str, FileName]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file. dtype: name in safetensors (BF16, I32, ...)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model directory by name: from `model.safetensors`, else from the files in its index.

    transformers uses the same order. Raises NoSuchFile if there is neither, and Unreadable if a file is damaged or
    contradicts the index.
    """
    single = directory / SINGLE
    if os.path.lexists(single):
        return read_header(single)
    index = directory / INDEX
    place, weight_map = str(index), _weight_map(index)
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        try:
            held = read_header(directory / file)
        except NoSuchFile as error:
            raise Unreadable(place, f"names {file}, and there is no such file; restore it") from error
        for name, tensor in held.items():
            if name in found:
                raise Unreadable(place, f"{name} is in two files, {found[name].file.name} and {file}; keep one")
            found[name] = tensor
    for name in sorted(found.keys() - weight_map.keys()):
        raise Unreadable(place, f"does not name {name}, which {found[name].file.name} holds; restore the index")
    for name, file in weight_map.items():
        if name not in found:
            raise Unreadable(place, f"names {name}, which none of its files holds; restore {file}")
        if found[name].file.name != file:
            raise Unreadable(place, f"says that {name} is in {file}, and {found[name].file.name} holds it")
    return found


def require_index(directory: Path) -> None:
    """Check that transformers can read a model's index: it needs `metadata`, which qarl does not.

    Raises:
        UserError: The index is damaged, or has no `metadata`.
    """
    index = directory / INDEX
    if os.path.lexists(directory / SINGLE) or not index.is_file():
        return
    _weight_map(index)
    if not isinstance(read_json_object(index).get("metadata"), dict):
        raise UserError(
            f'{index}: has no object `metadata`, which transformers needs; add "metadata": {{}} to the file'
        )


def shard_names(index: Path) -> list[str]:
    """Return the files in an index. Raises NoSuchFile, Unreadable."""
    return sorted(set(_weight_map(index).values()))


def _weight_map(index: Path) -> dict[str, str]:
    return checked(_Index, read_json_object(index), str(index)).weight_map


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file. Raises NoSuchFile, or Unreadable if it is damaged or truncated."""
    prefix, size = read_prefix(path, 8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8:
        raise Unreadable(str(path), "is cut short, or no safetensors file; restore it")
    if length > TEXT_BYTES:
        raise Unreadable(str(path), f"its header of {length:,} bytes is longer than the {TEXT_BYTES:,} that are read")
    header = parse_json(read_prefix(path, 8 + length)[0][8:], f"{path} (header)")
    if not isinstance(header, dict):
        raise Unreadable(str(path), "its header is no JSON object; restore it")
    header.pop("__metadata__", None)
    entries = checked(_Header, header, f"{path} (header)").root
    _check_layout(path, entries, size - 8 - length)
    return {name: StoredTensor(path, entry.dtype, tuple(entry.shape)) for name, entry in entries.items()}


def _check_layout(path: Path, entries: Mapping[str, _Entry], data_bytes: int) -> None:
    """Check that tensors are contiguous up to the end of the file, and that each has the size of its shape and
    dtype.
    """
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if entry.dtype not in _BITS:
            raise Unreadable(str(path), f"{name} is of the unknown type {entry.dtype[:20]!r}")
        if start != end or 8 * (stop - start) != _BITS[entry.dtype] * prod(entry.shape):
            raise Unreadable(str(path), f"{name} is not where its shape and type say (damaged header); restore it")
        end = stop
    if end != data_bytes:
        raise Unreadable(str(path), f"holds {data_bytes:,} bytes of tensors, its header says {end:,}; restore it")


def shown_names(names: Any, most: int = 3) -> str:
    """Format the first few names and the number of the others."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
