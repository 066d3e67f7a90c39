"""The metadata of a GGUF file, read without the gguf package (which takes seconds to index a vocabulary).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little-endian, versions 2 and 3.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.inputs.files import Unreadable, read_prefix

_SCALAR = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# Limits far above any real file, so that reading a header never takes more than a second.
_ENTRIES = 2**16  # keys of the metadata
_TENSORS = 2**18
_ITEMS = 2**21  # texts per list; a vocabulary has a few hundred thousand
_TEXT_BYTES = 2**24  # per key, name or text; a chat template has a few thousand
_DIMENSIONS = 4  # GGML_MAX_DIMS


@dataclass(frozen=True)
class GGUFArray:
    """A list in the metadata. Only its length is read."""

    length: int


@dataclass(frozen=True)
class GGUFHeader:
    """Header of a GGUF file.

    Attributes:
        metadata: Key -> value; lists are `GGUFArray`.
        tensors: Name -> shape in torch order (output features first), in file order.
    """

    metadata: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read a GGUF file's metadata and the names and shapes of its tensors.

    Raises:
        ValueError: Not a regular file, not a GGUF file of a known version, truncated, or beyond the limits of this
            module. One line, without the path.
    """
    try:
        start, size = read_prefix(path, 24)
    except Unreadable as error:
        raise ValueError(error.reason) from None
    if len(start) < 24:
        raise ValueError("is too short for a GGUF file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data).header()
        except (struct.error, UnicodeDecodeError, KeyError):
            raise ValueError("is a damaged GGUF file: its header ends early or holds unknown types") from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, format: str) -> Any:
        if self.at > len(self.data):  # beyond the offsets that struct supports
            raise struct.error
        (value,) = struct.unpack_from(format, self.data, self.at)
        self.at += struct.calcsize(format)
        return value

    def count(self, most: int, what: str) -> int:
        value = self.number("<Q")
        if value > most:
            raise ValueError(f"is a damaged GGUF file: it claims {value:,} {what}; at most {most:,} are read")
        return value

    def string(self) -> str:
        length = self.count(_TEXT_BYTES, "bytes of one text")
        self.at += length
        if self.at > len(self.data):
            raise struct.error
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_SCALAR[kind])
        kind = self.number("<I")
        if kind == _STRING:
            length = self.count(_ITEMS, "texts in one list")
            at, end, size = self.at, len(self.data), struct.Struct("<Q")
            for _ in range(length):
                if at > end:
                    raise struct.error
                at += 8 + size.unpack_from(self.data, at)[0]
            self.at = at
        else:
            length = self.number("<Q")
            self.at += length * struct.calcsize(_SCALAR[kind])
        return GGUFArray(length)

    def header(self) -> GGUFHeader:
        magic = self.data[:4]
        self.at = 4
        version = self.number("<I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("is not a GGUF file of version 2 or 3")
        tensor_count, metadata_count = self.count(_TENSORS, "tensors"), self.count(_ENTRIES, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self.string()
            if key in metadata:
                raise ValueError(f"is a damaged GGUF file: it holds the key {key[:60]!r} twice")
            metadata[key] = self.value(self.number("<I"))
        tensors: dict[str, tuple[int, ...]] = {}
        for _ in range(tensor_count):
            name = self.string()
            if name in tensors:
                raise ValueError(f"is a damaged GGUF file: it holds the tensor {name[:60]!r} twice")
            dimensions = self.number("<I")
            if dimensions > _DIMENSIONS:
                raise ValueError(f"is a damaged GGUF file: {name[:60]!r} has {dimensions:,} dimensions")
            tensors[name] = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
            self.at += 4 + 8  # type, offset
        if self.at > len(self.data):
            raise struct.error
        return GGUFHeader(metadata, tensors)
