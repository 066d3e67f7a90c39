"""Streaming safetensors writer that hashes files while writing them.

Writes the layout (https://github.com/huggingface/safetensors#format) itself instead of calling
`safetensors.torch.save_file`, for three reasons. Bytes are hashed while they are written. Tensors that are not
contiguous or live on a device are copied one at a time instead of all at once. A full disk raises an OSError with its
errno.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qarl.inputs.files import Unreadable, open_regular

CHUNK_BYTES = 16 * 2**20

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def safetensors_chunks(tensors: dict[str, Tensor]) -> Iterator[memoryview | bytes]:
    """Yield the bytes of a safetensors file. Tensors have any shape, layout and device; for dtypes see
    `DTYPE_NAMES`.
    """
    header, starts = _header({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    yield header
    for name in starts:
        yield from _pieces(tensors[name])


class TensorFile:
    """A new safetensors file to which tensors are written one at a time, in any order.

    A context manager: closes the file at the end, after an fsync unless the block raised.

    Args:
        path: A path that does not exist.
        specs: Name to (dtype, shape) of each tensor.
        metadata: Strings for the header.
        durable: False: without fsync.

    Raises:
        OSError: The disk refuses.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: dict[str, str],
        durable: bool = True,
    ) -> None:
        self._specs, self._durable = dict(specs), durable
        header, self._starts = _header(specs, metadata)
        self._file = open(path, "xb")  # noqa: SIM115 - closed by __exit__
        self._file.write(header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor of any layout and device at its offset."""
        expected = self._specs.pop(name)
        assert (tensor.dtype, tuple(tensor.shape)) == expected, f"{name}: {tensor.dtype} {tensor.shape}, not {expected}"
        self._file.seek(self._starts[name])
        for piece in _pieces(tensor):
            self._file.write(piece)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                assert not self._specs, f"{next(iter(self._specs))} was not written"
                self._file.flush()
                if self._durable:
                    os.fsync(self._file.fileno())
        finally:
            self._file.close()


def _header(
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the first tensor, and the offset of each tensor in file order."""
    # Widest dtype first, as the library orders them: every tensor then starts at a multiple of its item size.
    names = sorted(specs, key=lambda name: (-specs[name][0].itemsize, name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    starts: dict[str, int] = {}
    end = 0
    for name in names:
        dtype, shape = specs[name]
        starts[name], end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    encoded = len(encoded).to_bytes(8, "little") + encoded
    return encoded, {name: len(encoded) + start for name, start in starts.items()}


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    for start in range(0, flat.size, CHUNK_BYTES):
        yield flat[start : start + CHUNK_BYTES].data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file as CPU views of the mapped file. Raises NoSuchFile, Unreadable."""
    open_regular(path).close()
    try:
        return load_file(path)
    # KeyError: a dtype that torch does not have. The others: the file changed while it was mapped.
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise Unreadable(str(path), f"not a readable safetensors file ({' '.join(str(error).split())})") from error


def write_file(path: Path, chunks: Iterable[memoryview | bytes]) -> dict[str, Any]:
    """Write and fsync a new file. Returns {bytes, sha256}. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
