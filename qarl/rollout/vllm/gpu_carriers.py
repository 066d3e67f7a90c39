"""Carriers of tensors on a GPU: CUDA IPC to a sampler on the same one, NCCL to one on another. See `carriers.py`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from qarl.errors import UserError
from qarl.rollout.vllm.parcels import (
    Entry,
    Parcel,
    aligned,
    bytes_of,
    entry_of,
    from_inline,
    in_buffer,
    inline,
    is_inline,
    packed_buffers,
    plan_buffers,
    unpacked,
)

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

BUFFER_BYTES = 512 << 20  # of one NCCL broadcast
SMALL = 4 << 20  # bytes of a tensor that is quicker copied than opened by CUDA IPC
BUFFER = "#small"  # the entry of the buffer that holds such tensors
JOIN_LIMIT_S = 120  # for the other side to join
COUNTERS_START = 64  # bytes that torch's RefcountedMapAllocator keeps for itself before what it maps


class CudaIpcCarrier:
    """Hands out tensors on a GPU by their memory handles; they stay referenced until `release`.

    A handle takes 50 us or so to open, so tensors under `SMALL` bytes are copied into one buffer, whose handle comes
    first.
    """

    _STORAGE, _DEVICE, _COUNTER, _COUNTER_OFFSET = 4, 6, 11, 12  # places in what `rebuild_cuda_tensor` takes

    def __init__(self) -> None:
        self._sent: list[Tensor] = []
        self._handles: list[tuple[Any, ...]] = []

    def pack(self, tensors: Mapping[str, Tensor]) -> Parcel:
        small = {name: bytes_of(t) for name, t in tensors.items() if t.is_cuda and t.nbytes < SMALL}
        starts = dict(zip(small, accumulate((aligned(t.nbytes) for t in small.values()), initial=0), strict=False))
        entries = []
        if small:
            device = next(iter(small.values())).device
            buffer = torch.empty(sum(aligned(t.nbytes) for t in small.values()), dtype=torch.uint8, device=device)
            torch._foreach_copy_([buffer[starts[n] : starts[n] + t.nbytes] for n, t in small.items()],
                                 list(small.values()))  # fmt: skip
            torch.cuda.current_stream(device).synchronize()  # another process reads it
            entries.append(entry_of(BUFFER, buffer, self._handle(buffer)))
        for name, tensor in tensors.items():
            if name in small:
                entries.append(entry_of(name, tensor, starts[name]))
            else:
                entries.append(entry_of(name, tensor, self._handle(tensor)) if tensor.is_cuda else inline(name, tensor))
        return Parcel(tuple(entries), ())

    def _handle(self, tensor: Tensor) -> tuple[Any, ...]:
        tensor = tensor.detach().contiguous()
        _, handle = reduce_tensor(tensor)
        self._sent.append(tensor)
        self._handles.append(handle)
        return handle

    def transmit(self) -> None:
        pass

    def release(self) -> None:
        self._sent, self._handles = [], []
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def close(self) -> None:
        # torch keeps a tensor until its receiver has counted down, which one that is gone never will.
        for handle in filter(self._awaited, self._handles):
            handle[self._STORAGE]._release_ipc_counter(
                handle[self._COUNTER], handle[self._COUNTER_OFFSET], device=handle[self._DEVICE]
            )
        self.release()

    def _awaited(self, handle: tuple[Any, ...]) -> bool:
        """Whether the receiver has not counted down: torch's counters are int64 in a file of shared memory.

        Counting down a second time would make the counter negative, and one that another tensor gets later, too low.
        """
        counters = Path("/dev/shm", handle[self._COUNTER].decode().lstrip("/"))
        if not counters.exists():
            return False
        with counters.open("rb") as file:
            file.seek(COUNTERS_START + 8 * handle[self._COUNTER_OFFSET])
            return int.from_bytes(file.read(8), sys.byteorder, signed=True) > 0


class CudaIpcReceiver:
    """Opens the carrier's memory handles. device: the same GPU, as this process numbers it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(0)
        for entry in parcel.entries:
            if is_inline(entry):
                yield entry.name, from_inline(entry)
            elif isinstance(entry.place, int):
                yield entry.name, in_buffer(buffer, entry.place, entry)
            elif entry.name == BUFFER:
                buffer = self._opened(entry)
            else:
                yield entry.name, self._opened(entry)

    def _opened(self, entry: Entry) -> Tensor:
        handle = list(entry.place)
        handle[CudaIpcCarrier._DEVICE] = self._device.index  # the sender's number of it may be another
        with torch.cuda.device(self._device):
            return rebuild_cuda_tensor(*handle)

    def done(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        pass


def _connected(
    address: tuple[str, int], rank: int, device: torch.device, listening: socket.socket | None = None
) -> PyNcclCommunicator:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(
        *address, rank=rank, world_size=2, store_timeout=JOIN_LIMIT_S, listen_socket=listening
    )
    communicator = PyNcclCommunicator(group, device)
    if communicator.disabled:
        raise UserError("rollout.vllm.device: vLLM cannot load NCCL, by which weights go to another GPU; unset "
                        "VLLM_DISABLE_PYNCCL and install nvidia-nccl, or leave the key at null")  # fmt: skip
    return communicator


class NcclCarrier:
    """Broadcasts buffers to one receiver on another GPU of this host, and to no other after it.

    device: of the tensors, with an index. buffer_bytes: of one broadcast, and of the memory that stages it. address:
    where the receiver joins; `connect` waits for it.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._device, self._buffer_bytes = device, buffer_bytes
        self._listening: socket.socket | None = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()
        self._communicator: PyNcclCommunicator | None = None
        self._packed: tuple[Parcel, dict[str, Tensor]] | None = None

    def connect(self) -> None:
        """Wait for the receiver to join, for `JOIN_LIMIT_S` at most.

        Raises UserError where vLLM finds no NCCL, torch.distributed.DistError where the receiver does not come.
        """
        listening, self._listening = self._listening, None  # the group closes it
        self._communicator = _connected(self.address, 0, self._device, listening)

    def pack(self, tensors: Mapping[str, Tensor]) -> Parcel:
        on_device = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
        plan = plan_buffers(on_device, self._buffer_bytes)
        placed = {entry.name: entry for entry in plan.entries}
        entries = (placed[name] if name in placed else inline(name, tensor) for name, tensor in tensors.items())
        parcel = Parcel(tuple(entries), plan.buffers)
        self._packed = parcel, on_device
        return parcel

    def transmit(self) -> None:
        """Queue the broadcasts. Where the receiver dies now they never end: wait for its answer before this GPU."""
        assert self._packed is not None and self._communicator is not None, "packed and connected before"
        with torch.cuda.device(self._device):
            for buffer in packed_buffers(*self._packed):
                self._communicator.broadcast(buffer, src=0, stream=torch.cuda.current_stream())

    def release(self) -> None:
        self._packed = None

    def close(self) -> None:
        """Abort what is queued, and free everything."""
        self.release()
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None
        if self._listening is not None:
            self._listening.close()
            self._listening = None


class NcclReceiver:
    """Joins the carrier at its address and receives its buffers. device: this process's GPU, with an index."""

    def __init__(self, address: tuple[str, int], device: torch.device) -> None:
        """Wait for the carrier's `connect`. Raises UserError where vLLM finds no NCCL."""
        self._device = device
        self._communicator = _connected(address, 1, device)

    def take(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        """See `Receiver`; the tensors own their memory. Take to the end, or the carrier's broadcasts do not end."""
        return unpacked(parcel, self._receive)

    def _receive(self, size: int) -> Tensor:
        with torch.cuda.device(self._device):
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._communicator.broadcast(buffer, src=0, stream=torch.cuda.current_stream())
            return buffer

    def done(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._communicator.destroy()
