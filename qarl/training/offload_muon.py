"""Muon with momentum, and optionally master weights, in pinned host memory (`optim.offload`).

The momentum takes 4 bytes per parameter. The state of one batch of equal shapes is copied while another batch is
orthogonalized (`qarl.training.host_state`). Batches are the same as without offloading, so results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from qarl.training.host_state import HostState, Offloaded, StateSlice, aligned_load
from qarl.training.muon import BATCH_BYTES, batches, update_batch
from qarl.training.row_muon import RowMuon


class _Momenta(Offloaded):
    """Host-side momentum, shared by `OffloadedMuon` and `OffloadedRowMuon`.

    Args:
        groups: Parameter groups of the Muon base class.
        masters: Whether to keep the parameters' values on the host too, see `HostState`.
        rounded: dtype to whose values master weights on the host are rounded after an update; they stay float32.
        options: Options of the Muon base class.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        masters: bool = False,
        rounded: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self.host = HostState([p for group in self.param_groups for p in group["params"]], 1, masters)
        self._rounded = rounded

    def _state(self, parameter: Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            (state["momentum_buffer"],) = (moment.zero_() for moment in self.host.moments[parameter])
        return state

    def _load(self, members: Sequence[Parameter]) -> list[StateSlice]:
        for parameter in members:
            self._state(parameter)
        return aligned_load([self.host.of(parameter) for parameter in members])

    def _on_device(
        self, members: Sequence[Parameter], load: Sequence[StateSlice], slot: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return (momenta, masters) on the device. They are views of the slot, valid until its next load."""
        found = [[row.view(p.shape) for row in own.on_device(slot)] for p, own in zip(members, load, strict=True)]
        masters = [rows[-1] if self.values else p.detach() for p, rows in zip(members, found, strict=True)]
        return [rows[0] for rows in found], masters

    def _round(self, masters: Sequence[Tensor]) -> None:
        if self.values and self._rounded != torch.float32:
            for master in masters:
                master.copy_(master.to(self._rounded))


class OffloadedMuon(_Momenta, torch.optim.Muon):
    """`qarl.training.muon.BatchedMuon` with `momentum_buffer` on the host; on a CPU, `torch.optim.Muon`.

    Args:
        groups: See `_Momenta`.
        budget: Limit in bytes, see `BATCH_BYTES`.
        options: See `_Momenta`.
    """

    def __init__(self, groups: list[dict[str, Any]], budget: int = BATCH_BYTES, **options: Any) -> None:
        super().__init__(groups, **options)
        self._budget = budget

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "step takes no closure: compute the gradients before the step"
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            batched = [[members[i] for i in batch] for batch in batches([p.shape for p in members], self._budget)]
            self._update(batched, group)

    def _update(self, batched: Sequence[list[Parameter]], group: dict[str, Any]) -> None:
        loads = [self._load(batch) for batch in batched]

        def work(index: int, slot: Tensor) -> None:
            momenta, masters = self._on_device(batched[index], loads[index], slot)
            gradients = [parameter.grad for parameter in batched[index] if parameter.grad is not None]
            update_batch(masters, gradients, momenta, group)
            self._round(masters)

        self.host.stream_through_device(loads, work)


class OffloadedRowMuon(_Momenta, RowMuon):
    """`RowMuon` with the momentum of this rank's rows on the host. Takes the arguments of both bases by name."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "step takes no closure: compute the gradients before the step"
        (group,) = self.param_groups
        waves = list(self._waves())
        names = [self._own(wave) for wave in waves]
        members = [[self._matrices[name] for name in own] for own in names]
        loads = [self._load(own) for own in members]

        def work(index: int, slot: Tensor) -> None:
            momenta, masters = self._on_device(members[index], loads[index], slot)
            own = names[index]
            self._update(
                waves[index], group, dict(zip(own, momenta, strict=True)), dict(zip(own, masters, strict=True))
            )
            self._round(masters)

        self.host.stream_through_device(loads, work)
