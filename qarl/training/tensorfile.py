"""Tensors as safetensors bytes, and files that are hashed as they are written.

The layout (https://github.com/huggingface/safetensors#format) is written here rather than by
`safetensors.torch.save_file`: bytes are hashed as they go out, tensors that are not contiguous or live on a device are
copied one at a time instead of all at once, and a full disk arrives as an OSError with its errno.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 16 * 2**20

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def safetensors_chunks(tensors: dict[str, Tensor]) -> Iterator[memoryview | bytes]:
    """A safetensors file of tensors of any shape, layout and device, of a dtype in `DTYPE_NAMES`, in pieces."""
    # Widest dtype first, as the library orders them: every tensor then starts at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        dtype = DTYPE_NAMES[tensors[name].dtype]
        header[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, flat.size, CHUNK_BYTES):
            yield memoryview(flat[start : start + CHUNK_BYTES])


def write_file(path: Path, chunks: Iterable[memoryview | bytes]) -> dict[str, Any]:
    """Write and fsync a new file; returns {bytes, sha256}. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
