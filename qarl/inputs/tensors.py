"""Tensors in a model's safetensors files: types and shapes from the headers, and values by name. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from qarl.errors import UserError
from qarl.inputs.files import NoSuchFile, Unreadable, open_regular
from qarl.inputs.json import read_json_object
from qarl.inputs.schema import FileName, Record, checked
from qarl.utils.text import visible

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Types in safetensors headers and their names in torch. Other types keep their own names.
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TORCH_NAMES |= {"I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8"}
_TORCH_NAMES |= {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}


class _Index(Record):
    weight_map: dict[str, FileName]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file. dtype: torch's name (bfloat16, int32, ...)."""

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
            raise Unreadable(place, f"names {file}, which does not exist; restore it") from error
        for name, tensor in held.items():
            if name in found:
                raise Unreadable(place, f"{name} is in two files, {found[name].file.name} and {file}; keep one")
            found[name] = tensor
    for name in sorted(found.keys() - weight_map.keys()):
        raise Unreadable(place, f"does not name {name}, which {found[name].file.name} contains; restore the index")
    for name, file in weight_map.items():
        if name not in found:
            raise Unreadable(place, f"names {name}, which none of its files contains; restore {file}")
        if found[name].file.name != file:
            raise Unreadable(
                place, f"says that {name} is in {file}, but it is in {found[name].file.name}; restore the index"
            )
    return found


class OpenTensors:
    """Reads tensors of `stored` to the CPU. Opens each file once, because parsing a large header takes milliseconds.

    Reading raises the errors of the library: SafetensorError, OSError, RuntimeError.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self._opened: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __getitem__(self, name: str) -> Tensor:
        file = self._stored[name].file
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        return self._opened[file].get_tensor(name)


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
    """Return the names of the files in an index. Raises NoSuchFile, Unreadable."""
    return sorted(set(_weight_map(index).values()))


def _weight_map(index: Path) -> dict[str, str]:
    return checked(_Index, read_json_object(index), str(index)).weight_map


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file.

    Raises NoSuchFile, and Unreadable if the library rejects the header, which must describe the whole file.
    """
    open_regular(path).close()  # the library would wait for the writer of a pipe
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is not iterable
            return {
                name: StoredTensor(path, _TORCH_NAMES.get(of.get_dtype(), of.get_dtype()), tuple(of.get_shape()))
                for name, of in slices.items()
            }
    except (SafetensorError, OSError) as error:
        reason = visible(" ".join(str(error).removeprefix("Error while deserializing header: ").split())[:200])
        raise Unreadable(str(path), f"is truncated or not a safetensors file; restore it ({reason})") from error
