"""The carrier of tensors on a GPU: CUDA IPC, to a sampler on the same GPU or on another of this host.

See `carriers.py`. Both ways the receiver opens the learner's memory; on a GPU of its own it then copies from one to the
other, over NVLink where there is one. Nothing listens for that: a handle is worth something to processes of the same
user alone, and travels over the connection that is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from qarl.weight_sync.parcels import (
    ALIGNED,
    CudaHandle,
    Entry,
    Inline,
    Parcel,
    aligned,
    bytes_of,
    entry_of,
    from_inline,
    in_buffer,
    inline,
)

SMALL = 4 << 20  # bytes of a tensor that is quicker copied than opened by CUDA IPC
BUFFER = "#small"  # the entry of the buffer that holds such tensors
COUNTERS_START = 64  # bytes that torch's RefcountedMapAllocator keeps for itself before what it maps


class CudaIpcCarrier:
    """Hands out tensors on a GPU by their memory handles; they stay referenced until `release`.

    A handle takes 50 us or so to open, so tensors under `SMALL` bytes are copied into one buffer, whose handle comes
    first.
    """

    def __init__(self) -> None:
        self._sent: list[Tensor] = []
        self._handles: list[CudaHandle] = []

    def pack(self, tensors: Mapping[str, Tensor]) -> Parcel:
        small = {name: bytes_of(t) for name, t in tensors.items() if t.is_cuda and t.nbytes < SMALL}
        starts = dict(zip(small, accumulate((aligned(t.nbytes) for t in small.values()), initial=0), strict=False))
        entries = []
        if small:
            device = next(iter(small.values())).device
            size = sum(aligned(t.nbytes) for t in small.values()) or ALIGNED  # an empty one has no handle
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            torch._foreach_copy_(
                [buffer[starts[n] : starts[n] + t.nbytes] for n, t in small.items()], list(small.values())
            )
            torch.cuda.current_stream(device).synchronize()  # another process reads it
            entries.append(entry_of(BUFFER, buffer, self._handle(buffer)))
        for name, tensor in tensors.items():
            if name in small:
                entries.append(entry_of(name, tensor, starts[name]))
            else:
                entries.append(entry_of(name, tensor, self._handle(tensor)) if tensor.is_cuda else inline(name, tensor))
        return Parcel(tuple(entries))

    def _handle(self, tensor: Tensor) -> CudaHandle:
        tensor = tensor.detach().contiguous()
        _, (_, _, stride, start, _, _, device, handle, size, offset, _, counter, slot, event, synchronize) = (
            reduce_tensor(tensor)
        )
        made = CudaHandle(
            tuple(stride),
            start,
            device,
            handle.hex(),
            size,
            offset,
            counter.hex(),
            slot,
            event.hex(),
            bool(synchronize),
        )
        self._sent.append(tensor)
        self._handles.append(made)
        return made

    def release(self) -> None:
        self._sent, self._handles = [], []
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def close(self) -> None:
        # torch keeps a tensor until its receiver has counted down, which one that is gone never will.
        for handle in filter(self._awaited, self._handles):
            counter = bytes.fromhex(handle.counter)
            torch.TypedStorage._release_ipc_counter(counter, handle.slot, device=handle.device)
        self.release()

    def _awaited(self, handle: CudaHandle) -> bool:
        """Whether the receiver has not counted down: torch's counters are int64 in a file of shared memory.

        Counting down a second time would make the counter negative, and one that another tensor gets later, too low.
        """
        counters = Path("/dev/shm", bytes.fromhex(handle.counter).decode().lstrip("/"))
        if not counters.exists():
            return False
        with counters.open("rb") as file:
            file.seek(COUNTERS_START + 8 * handle.slot)
            return int.from_bytes(file.read(8), sys.byteorder, signed=True) > 0


class CudaIpcReceiver:
    """Opens the carrier's memory handles.

    device: this process's GPU. source: the carrier's, as this process numbers it; where it is another one, what is
    taken is a copy on `device`.
    """

    def __init__(self, device: torch.device, source: torch.device) -> None:
        self._device, self._source = device, source

    def take(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(0)
        for entry in parcel.entries:
            if isinstance(entry.place, Inline):
                yield entry.name, from_inline(entry)
            elif isinstance(entry.place, int):
                yield entry.name, in_buffer(buffer, entry.place, entry)
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
                self._source.index,  # the sender's number of it may be another
                bytes.fromhex(place.handle),
                place.size,
                place.offset,
                False,
                bytes.fromhex(place.counter),
                place.slot,
                bytes.fromhex(place.event),
                place.synchronize,
            )
            return opened.to(self._device)

    def done(self) -> None:
        if torch.cuda.is_initialized():
            for device in {self._device, self._source}:
                torch.cuda.synchronize(device)

    def close(self) -> None:
        pass
