"""AdamW with its two moments in pinned memory of the host (`optim.offload`): 8 bytes per parameter less on the GPU, and
12 where the masters are there as well.

In a step they pass through the GPU in buckets (`qarl.training.host_state`), each updated by the same fused kernel that
updates them there otherwise. No element's update depends on another's, so parameters and moments get the same bits. A
step takes as long as the bus needs for 8 bytes per parameter: about 1.3 s for the 64 GB of an 8B model at 50 GB/s in
both directions at once. Masters add 4 bytes, and 4 on the way in again, to be quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from qarl.training.host_state import ALIGNED, HostState, Offloaded, Passing, padded

BUCKET_BYTES = 2**28  # two buckets are on the GPU during a step


@dataclass(frozen=True)
class _Piece(Passing):
    """Some elements of one parameter, flat: exp_avg, exp_avg_sq, and the parameter's value where the host has it.
    parameter: None there."""

    parameter: Tensor | None
    gradient: Tensor
    step: Tensor

    def updated(self, slot: Tensor) -> list[Tensor]:
        """exp_avg, exp_avg_sq and the parameter, on the device."""
        passing = self.on_device(slot)
        return passing if self.parameter is None else [*passing, self.parameter]


class OffloadedAdamW(Offloaded, torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` with `exp_avg` and `exp_avg_sq` on the host; `step` stays with its parameter.

    groups, options: AdamW's, fused among them. masters: whether the parameters' values go to the host too, see
    `HostState`; after an update they are rounded to `rounded`.
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
        self.host = HostState([p for group in self.param_groups for p in group["params"]], 2, masters)
        self._elements = max(ALIGNED, bucket_bytes // (4 * self.host.rows) // ALIGNED * ALIGNED)
        self._rounded = rounded

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "step takes no closure: compute the gradients before the step"
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            if members:
                steps = [self._state(parameter)["step"] for parameter in members]
                torch._foreach_add_(steps, 1)
                self._update(list(self._buckets(members)), group)

    def _state(self, parameter: Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            first, second = self.host.moments[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = first.zero_(), second.zero_()
        return state

    def _buckets(self, members: Iterable[Parameter]) -> Iterator[list[_Piece]]:
        """The parameters cut into buckets, in their order."""
        bucket: list[_Piece] = []
        filled = 0
        for parameter in members:
            assert parameter.grad is not None
            flat = [tensor.view(-1) for tensor in self.host.of(parameter)]
            own = None if self.values else parameter.detach().view(-1)
            gradient, total, done = parameter.grad.reshape(-1), parameter.numel(), 0
            while done < total:
                part = slice(done, done + min(total - done, self._elements - filled))
                host = tuple(tensor[part] for tensor in flat)
                mine = None if own is None else own[part]
                bucket.append(_Piece(host, filled, mine, gradient[part], self.state[parameter]["step"]))
                done = part.stop
                filled = padded(bucket[-1].end)
                if filled >= self._elements:
                    yield bucket
                    bucket, filled = [], 0
        if bucket:
            yield bucket

    def _update(self, buckets: Sequence[list[_Piece]], group: dict[str, Any]) -> None:
        self.host.pass_through(buckets, lambda place, slot: self._fused(buckets[place], slot, group))

    def _fused(self, bucket: Sequence[_Piece], slot: Tensor, group: dict[str, Any]) -> None:
        """What `torch.optim.AdamW(fused=True)` does with whole parameters."""
        beta1, beta2 = group["betas"]
        first, second, parameters = zip(*(piece.updated(slot) for piece in bucket), strict=True)
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


class HostValues(Mapping[str, Tensor]):
    """Values by name that are copied to a device when requested, and freed when nobody holds them."""

    def __init__(self, values: Mapping[str, Tensor], device: torch.device) -> None:
        self._values, self._device = values, device

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name].to(self._device, non_blocking=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
