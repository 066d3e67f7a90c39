"""AdamW with its two moments in pinned memory of the host (`optim.offload`): 8 bytes a parameter less on the GPU, and
12 where the masters are there as well.

In a step they pass through the GPU in buckets: while one is updated by the same fused kernel that updates them there
otherwise, the next is on its way in and the last on its way out, each on a stream of its own. No element's update
depends on another's, so parameters and moments get the same bits. A step takes what the bus takes for 8 bytes a
parameter: an 8B model's 64 GB some 1.3 s at 50 GB/s, in both directions at once. Masters add 4 bytes, and 4 on the way
in again, to be quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from qarl.policy.handles import empty

BUCKET_BYTES = 2**28  # two buckets are on the GPU during a step
ARENA_BYTES = 2**33
_ALIGNED = 64  # elements: vectors of the kernel and lines of the bus


@dataclass(frozen=True)
class _Piece:
    """Some elements of one parameter, flat. parameter: None where the host has it. host: what passes through, exp_avg,
    exp_avg_sq and such a parameter. start: in the bucket."""

    parameter: Tensor | None
    gradient: Tensor
    host: tuple[Tensor, ...]
    step: Tensor
    start: int

    @property
    def end(self) -> int:
        return self.start + self.gradient.numel()

    def on_device(self, slot: Tensor) -> list[Tensor]:
        """exp_avg, exp_avg_sq and the parameter. slot: (2 or 3, size), where `host` is."""
        passing = [row[self.start : self.end] for row in slot]
        return passing if self.parameter is None else [*passing, self.parameter]


class OffloadedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` with `exp_avg` and `exp_avg_sq` on the host; `step` stays with its parameter.

    groups, options: AdamW's, fused among them; float32 parameters of one device, contiguous. masters: whether the
    parameters' values go to the host too; then a parameter is a handle (`qarl.policy.handles`), `values` has what it
    was, and after an update they are rounded to `rounded`. On a CPU, as in tests, buckets go through one after the
    other.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        bucket_bytes: int = BUCKET_BYTES,
        masters: bool = False,
        rounded: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        passing = 3 if masters else 2
        self._elements = max(_ALIGNED, bucket_bytes // (4 * passing) // _ALIGNED * _ALIGNED)
        self._passing, self._rounded = passing, rounded
        members = [parameter for group in self.param_groups for parameter in group["params"]]
        self._device = members[0].device
        assert all(parameter.device == self._device and parameter.is_contiguous() for parameter in members)
        pinned = self._device.type == "cuda"
        places = _host_tensors([parameter.shape for parameter in members for _ in range(passing)], pinned)
        self._places: dict[Parameter, tuple[Tensor, Tensor]] = {}
        self.values: dict[Parameter, Tensor] = {}
        for parameter in members:
            self._places[parameter] = next(places), next(places)
            if masters:
                self.values[parameter] = next(places).copy_(parameter.detach())
                empty([parameter], self._device)
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2)] if pinned else []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there before a step"
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            if members:
                steps = [self._state(parameter)["step"] for parameter in members]
                torch._foreach_add_(steps, 1)
                self._update(list(self._buckets(members)), group)

    def settle(self) -> None:
        """Wait until the last step's results are on the host."""
        for stream in self._streams:
            stream.synchronize()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies the moments to where they are kept. The groups' options stay as they are."""
        members = list(self._places)
        self.settle()
        self.state.clear()
        for place, found in state_dict["state"].items():
            for name, tensor in self._state(members[place]).items():
                tensor.copy_(found[name])

    def _state(self, parameter: Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            first, second = self._places[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = first.zero_(), second.zero_()
        return state

    def _buckets(self, members: Iterable[Parameter]) -> Iterator[list[_Piece]]:
        """The parameters cut into buckets, in their order."""
        bucket: list[_Piece] = []
        filled = 0
        for parameter in members:
            assert parameter.grad is not None
            state = self.state[parameter]
            moments = state["exp_avg"], state["exp_avg_sq"]
            held = (*moments, self.values[parameter]) if self.values else moments
            flat, own = [tensor.view(-1) for tensor in held], None if self.values else parameter.detach().view(-1)
            gradient, total, done = parameter.grad.reshape(-1), parameter.numel(), 0
            while done < total:
                part = slice(done, done + min(total - done, self._elements - filled))
                host = tuple(tensor[part] for tensor in flat)
                mine = None if own is None else own[part]
                bucket.append(_Piece(mine, gradient[part], host, state["step"], filled))
                done = part.stop
                filled = -(-bucket[-1].end // _ALIGNED) * _ALIGNED
                if filled >= self._elements:
                    yield bucket
                    bucket, filled = [], 0
        if bucket:
            yield bucket

    def _fused(self, bucket: Sequence[_Piece], slot: Tensor, group: dict[str, Any]) -> None:
        """What `torch.optim.AdamW(fused=True)` does with whole parameters."""
        beta1, beta2 = group["betas"]
        first, second, parameters = zip(*(piece.on_device(slot) for piece in bucket), strict=True)
        torch._fused_adamw_(
            parameters,
            [piece.gradient for piece in bucket],
            first,
            second,
            [],
            [piece.step for piece in bucket],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        if self.values and self._rounded != torch.float32:
            slot[2].copy_(slot[2].to(self._rounded))

    def _update(self, buckets: Sequence[list[_Piece]], group: dict[str, Any]) -> None:
        size = max((bucket[-1].end for bucket in buckets), default=0)
        slots = [torch.empty(self._passing, size, device=self._device) for _ in buckets[:2]]
        if not self._streams:
            for bucket in buckets:
                _bring(bucket, slots[0])
                self._fused(bucket, slots[0], group)
                _return(bucket, slots[0])
            return
        here, (inward, outward) = torch.cuda.current_stream(self._device), self._streams
        inward.wait_stream(here)  # which waited for the last step's way out, and whose memory the slots were
        free: list[torch.cuda.Event | None] = [None, None]
        try:
            for number, bucket in enumerate(buckets):
                slot = slots[number % 2]
                with torch.cuda.stream(inward):
                    if (event := free[number % 2]) is not None:
                        inward.wait_event(event)
                    _bring(bucket, slot)
                    arrived = inward.record_event()
                here.wait_event(arrived)
                self._fused(bucket, slot, group)
                updated = here.record_event()
                with torch.cuda.stream(outward):
                    outward.wait_event(updated)
                    _return(bucket, slot)
                    free[number % 2] = outward.record_event()
        finally:  # after an interrupt too, the slots' memory is handed out again in the order of this stream
            here.wait_stream(inward)
            here.wait_stream(outward)


def _bring(bucket: Sequence[_Piece], slot: Tensor) -> None:
    for piece in bucket:
        for row, host in zip(slot, piece.host, strict=True):
            row[piece.start : piece.end].copy_(host, non_blocking=True)


def _return(bucket: Sequence[_Piece], slot: Tensor) -> None:
    for piece in bucket:
        for row, host in zip(slot, piece.host, strict=True):
            host.copy_(row[piece.start : piece.end], non_blocking=True)


class HostValues(Mapping[str, Tensor]):
    """Values by name that come to a device when they are asked for, and go when nobody holds them."""

    def __init__(self, values: Mapping[str, Tensor], device: torch.device) -> None:
        self._values, self._device = values, device

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name].to(self._device, non_blocking=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _host_tensors(shapes: Sequence[torch.Size], pinned: bool) -> Iterator[Tensor]:
    """Float32 tensors of the host, of unknown content.

    torch rounds every pinned allocation up to a power of two, which for single tensors wastes up to half of it. So they
    are cut from arenas of such a size, that hold at least the largest.
    """
    arena, used = torch.empty(0), 0
    left = sum(_padded(shape) for shape in shapes)
    most = max(ARENA_BYTES // 4, *(1 << (_padded(shape) - 1).bit_length() for shape in shapes))
    for shape in shapes:
        size = _padded(shape)
        if used + size > arena.numel():
            arena, used = torch.empty(min(left, most), dtype=torch.float32, pin_memory=pinned), 0
        yield arena[used : used + shape.numel()].view(shape)
        used += size
        left -= size


def _padded(shape: torch.Size) -> int:
    return -(-shape.numel() // _ALIGNED) * _ALIGNED
