"""The metadata of a GGUF file, read without the gguf package (which takes seconds to index a vocabulary).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little-endian, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCALAR = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFHeader:
    """metadata: key -> value; of an array only its length (an int). tensors: names in the order of the file."""

    metadata: dict[str, Any]
    tensors: list[str]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read a GGUF file's metadata and tensor names.

    Raises ValueError (one line, without the path) when it is no GGUF of a known version or is cut short.
    """
    if path.stat().st_size < 24:
        raise ValueError("is too short for a GGUF file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data).header()
        except (struct.error, UnicodeDecodeError, KeyError):
            raise ValueError("is a damaged GGUF file: its header ends early or holds unknown types") from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, format: str) -> Any:
        (value,) = struct.unpack_from(format, self.data, self.at)
        self.at += struct.calcsize(format)
        return value

    def string(self) -> str:
        length = self.number("<Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_SCALAR[kind])
        kind, length = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            for _ in range(length):
                skip = self.number("<Q")  # moves self.at, so not within the next line
                self.at += skip
        else:
            self.at += length * struct.calcsize(_SCALAR[kind])
        return length

    def header(self) -> GGUFHeader:
        magic = self.data[:4]
        self.at = 4
        version = self.number("<I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("is not a GGUF file of version 2 or 3")
        tensor_count, metadata_count = self.number("<Q"), self.number("<Q")
        metadata = {}
        for _ in range(metadata_count):
            key = self.string()
            metadata[key] = self.value(self.number("<I"))
        tensors = []
        for _ in range(tensor_count):
            tensors.append(self.string())
            dimensions = self.number("<I")
            self.at += 8 * dimensions + 4 + 8  # sizes, type, offset
        return GGUFHeader(metadata, tensors)
