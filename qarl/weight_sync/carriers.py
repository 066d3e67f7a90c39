"""How tensors travel from the learner's process to the sampler's: a memory file, or CUDA IPC.

A carrier packs tensors and gives a parcel, a small description that the learner sends over the connection; a receiver
turns the parcel into the tensors. One publish:

    learner:  parcel = carrier.pack(tensors); send parcel; wait for the answer; carrier.release()
    sampler:  for name, tensor in receiver.take(parcel): load it
              receiver.done(); answer

- Memory file (CPU): the learner copies into shared memory, the sampler reads it there.
- CUDA IPC (GPUs of one host): the sampler reads the learner's tensors; only small ones are copied, into one buffer. On
  a GPU of its own it makes a copy there.

A tensor arrives on the kind of device that it left: the few CPU tensors beside those of a GPU (`weight_shape`) travel
inside the parcel.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from qarl.weight_sync.parcels import ALIGNED, Parcel, aligned, entry_of, in_buffer


class Carrier(Protocol):
    """The learner's side."""

    def pack(self, tensors: Mapping[str, Tensor]) -> Parcel:
        """Make tensors ready to travel; they must not change before `release`. One parcel at a time."""

    def release(self) -> None:
        """Let go of the packed tensors: the receiver is done with them."""

    def close(self) -> None:
        """Free everything, also in the middle of a parcel whose receiver is gone."""


class Receiver(Protocol):
    """The sampler's side."""

    def take(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        """The tensors by name, in order. They last until `done`: who keeps one makes a copy."""

    def done(self) -> None:
        """Finish reading: whatever was queued on the tensors has run when this returns."""

    def close(self) -> None:
        """Free everything."""


class MemoryFileCarrier:
    """Copies tensors into an anonymous file in memory, which grows as needed and keeps its memory until `close`.

    fd: of the file; a child inherits it through `subprocess.Popen(pass_fds=[carrier.fd])` under the same number.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("qarl-publish")

    def pack(self, tensors: Mapping[str, Tensor]) -> Parcel:
        starts = list(accumulate((aligned(tensor.nbytes) for tensor in tensors.values()), initial=0))
        entries = [entry_of(*item, start) for item, start in zip(tensors.items(), starts, strict=False)]
        size = max(starts[-1], ALIGNED)  # an empty file cannot be mapped
        os.ftruncate(self.fd, max(size, os.fstat(self.fd).st_size))
        buffer = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)
        for entry, start, tensor in zip(entries, starts, tensors.values(), strict=False):
            in_buffer(buffer, start, entry).copy_(tensor.detach())
        return Parcel(tuple(entries), size)

    def release(self) -> None:
        pass

    def close(self) -> None:
        os.close(self.fd)


class MemoryFileReceiver:
    """Maps the carrier's file. fd: the carrier's, inherited. What is written to a tensor stays in this process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def take(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        # The mapping lives as long as a tensor that looks into it: torch holds on to the buffer's owner.
        buffer = torch.frombuffer(mmap.mmap(self._fd, parcel.nbytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        for entry in parcel.entries:
            assert isinstance(entry.place, int)
            yield entry.name, in_buffer(buffer, entry.place, entry)

    def done(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._fd)
