"""What an optimizer keeps in memory of the host, and how it passes through the GPU in a step (`optim.offload`).

Loads follow one another through two slots of the GPU: while one is worked on, the next is on its way in and the last on
its way out, each on its own stream.
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

ARENA_BYTES = 2**33
ALIGNED = 64  # elements: vectors of the kernels and lines of the bus


@dataclass(frozen=True)
class Passing:
    """Elements that pass together. host: flat tensors of one length, each of which has a row of the slot. start: in
    it."""

    host: tuple[Tensor, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + self.host[0].numel()

    def on_device(self, slot: Tensor) -> list[Tensor]:
        """What `host` is while it is there. slot: (rows, elements)."""
        return [row[self.start : self.end] for row in slot]


class HostState:
    """float32 tensors of the parameters' shapes: `moments` for each, and with `masters` its values too.

    members: float32 parameters of one device, contiguous; with `masters` they become placeholders
    (`qarl.policy.skeleton`), and `values` has their values. On a CPU, as in tests, loads pass one after the other.
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
        """All tensors of a parameter that pass through, its value last."""
        value = self.values.get(parameter)
        return self.moments[parameter] if value is None else (*self.moments[parameter], value)

    def settle(self) -> None:
        """Wait until the last step's results are on the host."""
        for stream in self._streams:
            stream.synchronize()

    def pass_through(self, loads: Sequence[Sequence[Passing]], work: Callable[[int, Tensor], None]) -> None:
        """work(place, slot): on the load of that place, which is in `slot`, (rows, elements); what it makes of it there
        goes back to the host. A load may be empty."""
        size = max((passing.end for load in loads for passing in load), default=0)
        slots = [torch.empty(self.rows, size, device=self.device) for _ in loads[:2]]
        if not self._streams:
            for place, load in enumerate(loads):
                _bring(load, slots[0])
                work(place, slots[0])
                _return(load, slots[0])
            return
        here, (inward, outward) = torch.cuda.current_stream(self.device), self._streams
        inward.wait_stream(here)  # which waited for the last step's way out, and whose memory the slots were
        free: list[torch.cuda.Event | None] = [None, None]
        try:
            for place, load in enumerate(loads):
                slot = slots[place % 2]
                with torch.cuda.stream(inward):
                    if (event := free[place % 2]) is not None:
                        inward.wait_event(event)
                    _bring(load, slot)
                    arrived = inward.record_event()
                here.wait_event(arrived)
                work(place, slot)
                updated = here.record_event()
                with torch.cuda.stream(outward):
                    outward.wait_event(updated)
                    _return(load, slot)
                    free[place % 2] = outward.record_event()
        finally:  # after an interrupt too, the slots' memory is handed out again in the order of this stream
            here.wait_stream(inward)
            here.wait_stream(outward)


class Offloaded(torch.optim.Optimizer, ABC):
    """An optimizer whose state is a `HostState`. Its kinds say what torch calls the state of a parameter."""

    host: HostState

    @property
    def values(self) -> dict[Parameter, Tensor]:
        """The masters that the host has, by parameter; they may be about to change until `settle`."""
        return self.host.values

    def settle(self) -> None:
        """See `HostState.settle`."""
        self.host.settle()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies the state to where it is kept. The groups' options stay as they are."""
        members = list(self.host.moments)
        self.settle()
        self.state.clear()
        for place, found in state_dict["state"].items():
            for name, tensor in self._state(members[place]).items():
                tensor.copy_(found[name])

    @abstractmethod
    def _state(self, parameter: Parameter) -> dict[str, Tensor]:
        """State of a parameter with a gradient, by torch's names; zero if it had none yet."""


def in_order(members: Sequence[tuple[Tensor, ...]]) -> list[Passing]:
    """One load of whole tensors, aligned. members: of each what passes of it."""
    found, end = [], 0
    for host in members:
        found.append(Passing(tuple(tensor.view(-1) for tensor in host), end))
        end = padded(found[-1].end)
    return found


def _bring(load: Sequence[Passing], slot: Tensor) -> None:
    for passing in load:
        for row, host in zip(passing.on_device(slot), passing.host, strict=True):
            row.copy_(host, non_blocking=True)


def _return(load: Sequence[Passing], slot: Tensor) -> None:
    for passing in load:
        for row, host in zip(passing.on_device(slot), passing.host, strict=True):
            host.copy_(row, non_blocking=True)


def host_tensors(shapes: Sequence[torch.Size], pinned: bool) -> Iterator[Tensor]:
    """Float32 tensors of the host, of unknown content.

    torch rounds every pinned allocation up to a power of two, which for single tensors wastes up to half of it. So they
    are cut from arenas of such a size, that hold at least the largest.
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
    return -(-elements // ALIGNED) * ALIGNED
