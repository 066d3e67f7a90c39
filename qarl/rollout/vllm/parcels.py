"""Parcels: where tensors lie while they travel, as a small description that is pickled.

Tensors lie in buffers one after the other, at aligned places; small ones can be in the description itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNED = 64  # bytes: where a tensor starts in a buffer, fit for every dtype and for vector loads
INLINE_LIMIT = 1 << 16  # bytes of a tensor inside a parcel


@dataclass(frozen=True)
class Entry:
    """One tensor of a parcel. place: where its bytes are, in the terms of its carrier."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: Any


@dataclass(frozen=True)
class Parcel:
    """What a receiver must know; pickled. entries: in the order packed. buffers: bytes of each buffer they are in."""

    entries: tuple[Entry, ...]
    buffers: tuple[int, ...]


def aligned(size: int) -> int:
    """size rounded up to where the next tensor of a buffer may start."""
    return -(-size // ALIGNED) * ALIGNED


def entry_of(name: str, tensor: Tensor, place: Any) -> Entry:
    """The entry of a tensor that lies at `place`."""
    return Entry(name, tensor.dtype, tuple(tensor.shape), place)


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [nbytes]: the tensor's bytes in row-major order, a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def in_buffer(buffer: Tensor, start: int, entry: Entry) -> Tensor:
    """The entry's tensor as a view of a buffer. buffer: uint8; start: its first byte."""
    size = entry.dtype.itemsize * torch.Size(entry.shape).numel()
    return buffer[start : start + size].view(entry.dtype).view(entry.shape)


def inline(name: str, tensor: Tensor) -> Entry:
    """An entry whose place is the bytes themselves."""
    assert tensor.nbytes <= INLINE_LIMIT, f"{name}: {tensor.nbytes} bytes on the {tensor.device}, beside GPU tensors"
    return entry_of(name, tensor, bytes_of(tensor).numpy().tobytes())


def is_inline(entry: Entry) -> bool:
    """Whether the entry's place is its bytes."""
    return isinstance(entry.place, bytes)


def from_inline(entry: Entry) -> Tensor:
    """The tensor of such an entry, on the CPU."""
    if not entry.place:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return in_buffer(torch.frombuffer(bytearray(entry.place), dtype=torch.uint8), 0, entry)


def plan_buffers(tensors: Mapping[str, Tensor], limit: int) -> Parcel:
    """Distribute tensors over buffers of at most `limit` bytes, in order; a larger tensor has a buffer of its own.

    The place of an entry is (number of the buffer, first byte in it).
    """
    entries: list[Entry] = []
    sizes: list[int] = []
    for name, tensor in tensors.items():
        if not sizes or aligned(sizes[-1]) + tensor.nbytes > limit:
            sizes.append(0)
        start = aligned(sizes[-1])
        entries.append(entry_of(name, tensor, (len(sizes) - 1, start)))
        sizes[-1] = start + tensor.nbytes
    return Parcel(tuple(entries), tuple(sizes))


def packed_buffers(parcel: Parcel, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The filled buffers of a plan, uint8; they share one memory, so each lasts until the next is asked for.

    A tensor that has a buffer of its own is that buffer.
    """
    contents: list[list[Entry]] = [[] for _ in parcel.buffers]
    for entry in parcel.entries:
        if not is_inline(entry):
            contents[entry.place[0]].append(entry)
    shared = [size for size, entries in zip(parcel.buffers, contents, strict=True) if len(entries) > 1]
    staging: Tensor | None = None
    for size, entries in zip(parcel.buffers, contents, strict=True):
        if len(entries) == 1:
            yield bytes_of(tensors[entries[0].name])
            continue
        if staging is None:
            device = tensors[entries[0].name].device
            staging = torch.empty(max(shared), dtype=torch.uint8, device=device)
        for entry in entries:
            in_buffer(staging, entry.place[1], entry).copy_(tensors[entry.name].detach())
        yield staging[:size]


def unpacked(parcel: Parcel, receive: Callable[[int], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a plan, as views of the buffers. receive: gives the next buffer, in memory of its own."""
    at, buffer = -1, torch.empty(0)
    for entry in parcel.entries:
        if is_inline(entry):
            yield entry.name, from_inline(entry)
            continue
        number, start = entry.place
        if number != at:
            at, buffer = number, receive(parcel.buffers[number])
        yield entry.name, in_buffer(buffer, start, entry)
