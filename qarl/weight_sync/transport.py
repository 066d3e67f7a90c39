"""Transport of tensors from the learner's process to the sampler's, through a memory file or CUDA IPC.

    learner:  payload = transport.pack(tensors); send payload; wait for the answer; transport.release()
    sampler:  for name, tensor in receiver.take(payload): load it
              receiver.done(); answer

- Memory file (CPU): the learner copies tensors into shared memory, and the sampler reads them there.
- CUDA IPC (GPUs of one host): the sampler opens the learner's memory. If it has its own GPU, it copies tensors to it,
  over NVLink if available. No port is opened, and only processes of the same user can open a handle.

CPU tensors arrive on the CPU, and GPU tensors on a GPU.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

ALIGNED = 64  # bytes: alignment of tensors in a buffer, enough for every dtype and for vector loads


@dataclass(frozen=True)
class CudaHandle:
    """A tensor in GPU memory, as torch's CUDA IPC describes it to another process."""

    stride: tuple[int, ...]
    start: int  # of the tensor in its storage, in elements
    device: int  # the sender's index of the GPU
    handle: bytes  # of the allocation
    size: int  # of the storage, in bytes
    offset: int  # of the storage in the allocation, in bytes
    counter: bytes  # name of the shared-memory file in which receivers count down
    slot: int  # index of the counter in that file
    event: bytes  # to wait for before reading, if `synchronize`
    synchronize: bool


@dataclass(frozen=True)
class Entry:
    """One tensor of a payload.

    dtype: Such as `int32`. place: Offset in the buffer in bytes, the bytes themselves, or a handle.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: int | bytes | CudaHandle

    @classmethod
    def of(cls, name: str, tensor: Tensor, place: int | bytes | CudaHandle) -> Entry:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), place)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

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


SMALL = 4 << 20  # bytes: opening a handle takes about 50 us, copying a smaller tensor takes less
BUFFER = "#small"  # entry of the buffer of small tensors
INLINE_LIMIT = 1 << 16  # bytes of a CPU tensor beside those of a GPU (`weight_shape`), which travels in its entry
COUNTERS_START = 64  # bytes that torch's RefcountedMapAllocator reserves before the counters


@dataclass(frozen=True)
class ReceiverPlan:
    """File descriptors and GPUs that the sampler's process needs to open its receiver.

    fds: The memory file. gpus: For CUDA IPC, the sampler's GPU, then the learner's if it is another one; CUDA indices
    as the learner's process numbers them.
    """

    fds: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


class MemoryFileTransport:
    """Copies tensors into an anonymous memory file, which grows as needed and is kept until `close`."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("qarl-publish")
        self.plan = ReceiverPlan(fds=(self.fd,))

    def pack(self, tensors: Mapping[str, Tensor]) -> Payload:
        """Prepare tensors. They must not change before `release`, and only one payload can be in use."""
        starts = list(accumulate((aligned(tensor.nbytes) for tensor in tensors.values()), initial=0))
        entries = [Entry.of(*item, start) for item, start in zip(tensors.items(), starts, strict=False)]
        size = max(starts[-1], ALIGNED)  # an empty file cannot be mapped
        os.ftruncate(self.fd, max(size, os.fstat(self.fd).st_size))
        buffer = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)
        for entry, start, tensor in zip(entries, starts, tensors.values(), strict=False):
            entry.view(buffer[start:]).copy_(tensor.detach())
        return Payload(tuple(entries), size)

    def release(self) -> None:
        """Let go of the packed tensors, after the receiver is done."""

    def close(self) -> None:
        """Free everything, even if the receiver died before it was done."""
        os.close(self.fd)


class MemoryFileReceiver:
    """Maps the memory file (`fd`, inherited) copy-on-write: what the sampler writes stays in its process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def take(self, payload: Payload) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in packing order. Tensors are valid until `done`."""
        # The mapping lives as long as a tensor in it: torch keeps a reference to the owner of the buffer.
        buffer = torch.frombuffer(mmap.mmap(self._fd, payload.nbytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        for entry in payload.entries:
            assert isinstance(entry.place, int)
            yield entry.name, entry.view(buffer[entry.place :])

    def done(self) -> None:
        """Wait for all work that is queued on the tensors."""


class CudaIpcTransport:
    """Sends memory handles of GPU tensors, which stay referenced until `release`. gpus: see `ReceiverPlan`.

    A handle counts one receiver, so each process of a sampler needs its own transport.
    """

    def __init__(self, gpus: tuple[int, ...]) -> None:
        self.plan = ReceiverPlan(gpus=gpus)
        self._sent: list[Tensor] = []
        self._handles: list[CudaHandle] = []

    def pack(self, tensors: Mapping[str, Tensor]) -> Payload:
        small = {name: bytes_of(t) for name, t in tensors.items() if t.is_cuda and t.nbytes < SMALL}
        entries, starts = self._pack_small(small)
        for name, tensor in tensors.items():
            if name in starts:
                entries.append(Entry.of(name, tensor, starts[name]))
            elif tensor.is_cuda:
                entries.append(Entry.of(name, tensor, self._handle(tensor)))
            else:
                assert tensor.nbytes <= INLINE_LIMIT, f"{name}: {tensor.nbytes} bytes on the {tensor.device}"
                entries.append(Entry.of(name, tensor, bytes_of(tensor).numpy().tobytes()))
        return Payload(tuple(entries))

    def _pack_small(self, small: Mapping[str, Tensor]) -> tuple[list[Entry], dict[str, int]]:
        """Copy small tensors, given as bytes, into one buffer. Returns (its entry, offsets by name)."""
        if not small:
            return [], {}
        *offsets, size = accumulate((aligned(tensor.nbytes) for tensor in small.values()), initial=0)
        starts = dict(zip(small, offsets, strict=True))
        device = next(iter(small.values())).device
        buffer = torch.empty(size or ALIGNED, dtype=torch.uint8, device=device)  # an empty tensor has no handle
        torch._foreach_copy_([buffer[starts[n] :][: t.nbytes] for n, t in small.items()], list(small.values()))
        torch.cuda.current_stream(device).synchronize()  # another process reads it
        return [Entry.of(BUFFER, buffer, self._handle(buffer))], starts

    def _handle(self, tensor: Tensor) -> CudaHandle:
        tensor = tensor.detach().contiguous()
        _, (_, _, stride, start, _, _, device, handle, size, offset, _, counter, slot, event, synchronize) = (
            reduce_tensor(tensor)
        )
        made = CudaHandle(tuple(stride), start, device, handle, size, offset, counter, slot, event, synchronize)
        self._sent.append(tensor)
        self._handles.append(made)
        return made

    def release(self) -> None:
        self._sent, self._handles = [], []
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def close(self) -> None:
        # torch keeps a tensor until its receiver has counted down. A receiver that died never does.
        for handle in filter(self._awaited, self._handles):
            torch.TypedStorage._release_ipc_counter(handle.counter, handle.slot, device=handle.device)
        self.release()

    def _awaited(self, handle: CudaHandle) -> bool:
        """Whether the receiver has not counted down. torch's counters are int64 in a shared-memory file.

        Counting down twice would make the counter negative, and too low for the tensor that gets it next.
        """
        counters = Path("/dev/shm", handle.counter.decode().lstrip("/"))
        if not counters.exists():
            return False
        with counters.open("rb") as file:
            file.seek(COUNTERS_START + 8 * handle.slot)
            return int.from_bytes(file.read(8), sys.byteorder, signed=True) > 0


class CudaIpcReceiver:
    """Opens memory handles on `source`, the learner's GPU in this process's numbering, and copies to `device` if it is
    another one.
    """

    def __init__(self, device: torch.device, source: torch.device) -> None:
        self._device, self._source = device, source

    def take(self, payload: Payload) -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(0)
        for entry in payload.entries:
            if isinstance(entry.place, bytes):
                yield entry.name, entry.view(torch.tensor(list(entry.place), dtype=torch.uint8))
            elif isinstance(entry.place, int):
                yield entry.name, entry.view(buffer[entry.place :])
            elif entry.name == BUFFER:
                buffer = self._opened(entry, entry.place)
            else:
                yield entry.name, self._opened(entry, entry.place)

    def _opened(self, entry: Entry, place: CudaHandle) -> Tensor:
        with torch.cuda.device(self._source):
            opened = rebuild_cuda_tensor(
                Tensor,
                torch.Size(entry.shape),
                place.stride,
                place.start,
                torch.TypedStorage,
                entry.torch_dtype,
                self._source.index,  # the sender's index may differ
                place.handle,
                place.size,
                place.offset,
                False,
                place.counter,
                place.slot,
                place.event,
                place.synchronize,
            )
            return opened.to(self._device)

    def done(self) -> None:
        if torch.cuda.is_initialized():
            for device in {self._device, self._source}:
                torch.cuda.synchronize(device)


Transport = MemoryFileTransport | CudaIpcTransport
Receiver = MemoryFileReceiver | CudaIpcReceiver


def open_transport(learner: torch.device, sampler_gpu: int | None) -> Transport:
    """Return a transport to one sampler process: CUDA IPC for a learner on a GPU, otherwise a memory file.

    sampler_gpu: CUDA index of the sampler's GPU. None: the learner's.
    """
    if learner.type == "cpu":
        return MemoryFileTransport()
    source = learner_gpu(learner)
    own = source if sampler_gpu is None else sampler_gpu
    return CudaIpcTransport((own,) if own == source else (own, source))


def open_receiver(plan: ReceiverPlan) -> Receiver:
    """Return the receiver of a transport, in the sampler's process, which sees the plan's GPUs as 0 and 1."""
    if plan.fds:
        return MemoryFileReceiver(*plan.fds)
    return CudaIpcReceiver(torch.device("cuda", 0), torch.device("cuda", len(plan.gpus) - 1))


def learner_gpu(device: torch.device) -> int:
    """Return the CUDA index of the learner's GPU."""
    return torch.cuda.current_device() if device.index is None else device.index
