"""Optimizer state in host memory, streamed through the GPU in each step (`optim.offload`).

A load is the state that is copied to the GPU at once, into a buffer called slot. Two slots alternate: while one load is
processed on the GPU, the next one is copied in and the previous one is copied out, each on its own stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from qarl.policy.skeleton import drop_values

ARENA_BYTES = 2**33  # largest arena of pinned memory, unless one tensor needs more; see `host_tensors`
ALIGNED = 64  # elements; 256 bytes are a multiple of a kernel's vectors and of PCIe transfers


@dataclass(frozen=True)
class StateSlice:
    """A part of a load: host tensors, and their position in the slot.

    Attributes:
        host: Flat host tensors of equal length, one per row of the slot.
        start: Their first element in each row of the slot.
    """

    host: tuple[Tensor, ...]
    start: int

    @property
    def end(self) -> int:
        """First element after the slice in the slot."""
        return self.start + self.host[0].numel()

    def on_device(self, slot: Tensor) -> list[Tensor]:
        """Return the GPU copies of `host`, which are views of the slot (rows, elements)."""
        return [row[self.start : self.end] for row in slot]


class HostState:
    """Float32 state tensors in host memory: `moments` per parameter and, optionally, the parameter's value.

    If the parameters are on a CPU, as in tests, loads are processed sequentially.

    Args:
        members: Contiguous float32 parameters on one device.
        moments: Number of state tensors per parameter.
        masters: Also keep the parameters' values on the host, in `values`. The parameters become placeholders
            (`qarl.policy.skeleton`).

    Attributes:
        rows: Rows of a slot: number of streamed tensors per parameter.
        moments: State tensors by parameter, each with the parameter's shape.
        values: Value by parameter; empty unless `masters`.
    """

    def __init__(self, members: Sequence[Parameter], moments: int, masters: bool) -> None:
        self.device = members[0].device if members else torch.device("cpu")
        assert all(parameter.device == self.device and parameter.is_contiguous() for parameter in members)
        self.rows = moments + masters
        pinned = self.device.type == "cuda"
        tensors = host_tensors([parameter.shape for parameter in members for _ in range(self.rows)], pinned)
        self.moments: dict[Parameter, tuple[Tensor, ...]] = {}
        self.values: dict[Parameter, Tensor] = {}
        for parameter in members:
            self.moments[parameter] = tuple(next(tensors) for _ in range(moments))
            if masters:
                self.values[parameter] = next(tensors).copy_(parameter.detach())
                drop_values([parameter], self.device)
        self._streams = [torch.cuda.Stream(self.device) for _ in range(2)] if pinned else []

    def of(self, parameter: Parameter) -> tuple[Tensor, ...]:
        """Return the streamed tensors of a parameter: its moments, then its value if the host keeps it."""
        value = self.values.get(parameter)
        return self.moments[parameter] if value is None else (*self.moments[parameter], value)

    def settle(self) -> None:
        """Wait until the results of the last step are on the host."""
        for stream in self._streams:
            stream.synchronize()

    def stream_through_device(self, loads: Sequence[Sequence[StateSlice]], work: Callable[[int, Tensor], None]) -> None:
        """Copy each load to the GPU, process it, and copy it back.

        Args:
            loads: State slices per load. A load may be empty.
            work: `work(index, slot)` updates load `index` in place in `slot`, (rows, elements) float32 on the GPU.
        """
        size = max((part.end for load in loads for part in load), default=0)
        slots = [torch.empty(self.rows, size, device=self.device) for _ in loads[:2]]
        if not self._streams:
            for index, load in enumerate(loads):
                _copy_in(load, slots[0])
                work(index, slots[0])
                _copy_out(load, slots[0])
            return
        compute, (copy_in, copy_out) = torch.cuda.current_stream(self.device), self._streams
        copy_in.wait_stream(compute)  # which allocated the slots, and waits for the copies out of the last call
        free: list[torch.cuda.Event | None] = [None, None]
        try:
            for index, load in enumerate(loads):
                slot = slots[index % 2]
                with torch.cuda.stream(copy_in):
                    if (event := free[index % 2]) is not None:
                        copy_in.wait_event(event)
                    _copy_in(load, slot)
                    arrived = copy_in.record_event()
                compute.wait_event(arrived)
                work(index, slot)
                updated = compute.record_event()
                with torch.cuda.stream(copy_out):
                    copy_out.wait_event(updated)
                    _copy_out(load, slot)
                    free[index % 2] = copy_out.record_event()
        finally:  # also after an interrupt: the allocator reuses the slots in this stream's order
            compute.wait_stream(copy_in)
            compute.wait_stream(copy_out)


class Offloaded(torch.optim.Optimizer, ABC):
    """Optimizer whose state is a `HostState`. Subclasses map it to torch's state names."""

    host: HostState

    @property
    def values(self) -> dict[Parameter, Tensor]:
        """Master weights on the host, by parameter. Copies may be in flight until `settle`."""
        return self.host.values

    def settle(self) -> None:
        """See `HostState.settle`."""
        self.host.settle()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the state to the host tensors. Ignores the hyperparameters of the groups."""
        members = list(self.host.moments)
        self.settle()
        self.state.clear()
        for index, found in state_dict["state"].items():
            for name, tensor in self._state(members[index]).items():
                tensor.copy_(found[name])

    @abstractmethod
    def _state(self, parameter: Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter by torch's names; create it with zeros if missing."""


def aligned_load(members: Sequence[tuple[Tensor, ...]]) -> list[StateSlice]:
    """Return one load of whole tensors at aligned offsets.

    Args:
        members: Host tensors of each parameter.
    """
    found, end = [], 0
    for host in members:
        found.append(StateSlice(tuple(tensor.view(-1) for tensor in host), end))
        end = padded(found[-1].end)
    return found


def _copy_in(load: Sequence[StateSlice], slot: Tensor) -> None:
    for part in load:
        for row, host in zip(part.on_device(slot), part.host, strict=True):
            row.copy_(host, non_blocking=True)


def _copy_out(load: Sequence[StateSlice], slot: Tensor) -> None:
    for part in load:
        for row, host in zip(part.on_device(slot), part.host, strict=True):
            host.copy_(row, non_blocking=True)


def host_tensors(shapes: Sequence[torch.Size], pinned: bool) -> Iterator[Tensor]:
    """Yield uninitialized float32 host tensors of the given shapes.

    torch rounds each pinned allocation up to a power of two, which wastes up to half of it. The tensors are therefore
    cut from large arenas whose size is a power of two.
    """
    arena, used = torch.empty(0), 0
    left = sum(padded(shape.numel()) for shape in shapes)
    most = max([ARENA_BYTES // 4, *(1 << (padded(shape.numel()) - 1).bit_length() for shape in shapes)])
    for shape in shapes:
        size = padded(shape.numel())
        if used + size > arena.numel():
            arena, used = torch.empty(min(left, most), dtype=torch.float32, pin_memory=pinned), 0
        yield arena[used : used + shape.numel()].view(shape)
        used += size
        left -= size


def padded(elements: int) -> int:
    """Round a number of elements up to a multiple of `ALIGNED`."""
    return -(-elements // ALIGNED) * ALIGNED
