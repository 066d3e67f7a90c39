"""Payload: a small, plain-data description from which a receiver opens tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNED = 64  # bytes: alignment of tensors in a buffer, enough for every dtype and for vector loads
DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class CudaHandle:
    """A tensor in GPU memory, as torch's CUDA IPC describes it to another process; bytes are in hexadecimal."""

    stride: tuple[int, ...]
    start: int  # of the tensor in its storage, in elements
    device: int  # the sender's index of the GPU
    handle: str  # of the allocation
    size: int  # of the storage, in bytes
    offset: int  # of the storage in the allocation, in bytes
    counter: str  # name of the shared-memory file in which receivers count down
    slot: int  # index of the counter in that file
    event: str  # to wait for before reading, if `synchronize`
    synchronize: bool


@dataclass(frozen=True)
class Entry:
    """One tensor of a payload.

    dtype: as `torch` names it. place: offset in the buffer in bytes, the bytes themselves in hexadecimal, or a handle.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: int | str | CudaHandle

    @classmethod
    def of(cls, name: str, tensor: Tensor, place: int | str | CudaHandle) -> Entry:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), place)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor at the beginning of a uint8 buffer, as a view."""
        size = self.torch_dtype.itemsize * torch.Size(self.shape).numel()
        return buffer[:size].view(self.torch_dtype).view(self.shape)


@dataclass(frozen=True)
class Payload:
    """Packed tensors. entries: in packing order. nbytes: size of the memory file; 0 for CUDA IPC."""

    entries: tuple[Entry, ...]
    nbytes: int = 0


def aligned(size: int) -> int:
    """Round up to a multiple of `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes in row-major order, uint8 (nbytes,): a view if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
