"""Parcels: where tensors lie while they travel, as a small description of plain data.

Tensors lie in a buffer one after the other, at aligned places; small ones can be in the description itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNED = 64  # bytes: where a tensor starts in a buffer, fit for every dtype and for vector loads
INLINE_LIMIT = 1 << 16  # bytes of a tensor inside a parcel
DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class Inline:
    """The bytes of a tensor themselves, in hexadecimal."""

    hex: str


@dataclass(frozen=True)
class CudaHandle:
    """How another process opens a tensor in the memory of a GPU, in the terms of torch's CUDA IPC; bytes as hex.

    stride, start: of the tensor in its storage, in elements. handle: of the allocation. size, offset: of the storage
    there, in bytes. counter, slot: the file of shared memory and the place in it where receivers count down. event,
    synchronize: what to wait for before reading. device: the sender's number of the GPU.
    """

    stride: tuple[int, ...]
    start: int
    device: int
    handle: str
    size: int
    offset: int
    counter: str
    slot: int
    event: str
    synchronize: bool


@dataclass(frozen=True)
class Entry:
    """One tensor of a parcel. dtype: as `torch` names it. place: its first byte in the buffer, or where else it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: int | Inline | CudaHandle

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Parcel:
    """What a receiver must know. entries: in the order packed. nbytes: of the memory file, 0 where there is none."""

    entries: tuple[Entry, ...]
    nbytes: int = 0


def aligned(size: int) -> int:
    """size rounded up to where the next tensor of a buffer may start."""
    return -(-size // ALIGNED) * ALIGNED


def entry_of(name: str, tensor: Tensor, place: int | Inline | CudaHandle) -> Entry:
    """The entry of a tensor that lies at `place`."""
    return Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), place)


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [nbytes]: the tensor's bytes in row-major order, a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def in_buffer(buffer: Tensor, start: int, entry: Entry) -> Tensor:
    """The entry's tensor as a view of a buffer. buffer: uint8; start: its first byte."""
    size = entry.torch_dtype.itemsize * torch.Size(entry.shape).numel()
    return buffer[start : start + size].view(entry.torch_dtype).view(entry.shape)


def inline(name: str, tensor: Tensor) -> Entry:
    """An entry whose place is the bytes themselves."""
    assert tensor.nbytes <= INLINE_LIMIT, f"{name}: {tensor.nbytes} bytes on the {tensor.device}, beside GPU tensors"
    return entry_of(name, tensor, Inline(bytes_of(tensor).numpy().tobytes().hex()))


def from_inline(entry: Entry) -> Tensor:
    """The tensor of such an entry, on the CPU."""
    assert isinstance(entry.place, Inline)
    if not entry.place.hex:
        return torch.empty(entry.shape, dtype=entry.torch_dtype)
    return in_buffer(torch.frombuffer(bytearray.fromhex(entry.place.hex), dtype=torch.uint8), 0, entry)
