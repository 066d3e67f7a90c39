"""Muon on row-sharded matrices: each whole matrix is gathered and orthogonalized on one rank.

Momentum and master weights stay on the rank of their rows. Each rank sends its rows of the update to the matrix's owner
in bf16, the dtype that Muon rounds to anyway, and receives the orthogonalized rows. This moves 4 bytes per parameter
and step, spread over the ranks. An expert whose rows are all on one rank is owned by that rank and not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from qarl.distributed.exchange import Exchange
from qarl.distributed.rows import RowPlan
from qarl.training.muon import BATCH_BYTES, adjusted, at_once, momentum_of, newton_schulz


class RowMuon(torch.optim.Muon):
    """`BatchedMuon` on row-sharded matrices. A step is a collective.

    On a CPU the results have the same bits as those of `BatchedMuon`. On a GPU they differ by rounding if batch sizes
    differ.

    Args:
        groups: One group with the non-empty entries of `matrices`.
        matrices: This rank's rows (rows, K) float32 of each matrix, by name, in the same order on all ranks.
        plan: Assignment of rows to ranks.
        exchange: Moves rows between ranks.
        budget: Limit in bytes, see `BATCH_BYTES`.
        options: Options of `torch.optim.Muon`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: Mapping[str, Parameter],
        plan: RowPlan,
        exchange: Exchange,
        budget: int = BATCH_BYTES,
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self._matrices, self._plan, self._exchange, self._budget = matrices, plan, exchange, budget
        self._everyone = range(exchange.count)
        self._owners = {name: self._everyone for name in matrices}  # candidates; the least loaded one owns it
        for block in plan.blocks:
            for name in block if len(block) > 1 else ():  # a block of several matrices: the experts of a layer
                holders = [rank for rank, rows in enumerate(plan.cut(name)) if rows]
                if len(holders) == 1 and name in matrices:
                    self._owners[name] = range(holders[0], holders[0] + 1)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "step takes no closure: compute the gradients before the step"
        (group,) = self.param_groups
        for wave in self._waves():
            own = {name: self._matrices[name] for name in self._own(wave)}
            self._update(wave, group, {name: momentum_of(rows, self.state) for name, rows in own.items()}, own)

    def _own(self, wave: list[list[str]]) -> list[str]:
        """Return the names of the matrices that have rows on this rank."""
        return [name for names in wave for name in names if self._matrices[name].numel()]

    def _waves(self) -> Iterator[list[list[str]]]:
        """Yield waves: per owning rank a batch of names, possibly empty. Matrices of a wave have the same shape."""
        shapes: dict[torch.Size, list[list[str]]] = {}
        for name, rows in self._matrices.items():
            if rows.grad is not None:
                of_ranks = shapes.setdefault(torch.Size(self._plan.shapes[name]), [[] for _ in self._everyone])
                min((of_ranks[rank] for rank in self._owners[name]), key=len).append(name)
        for shape, of_ranks in shapes.items():
            count = at_once(shape, self._budget)
            for first in range(0, max(map(len, of_ranks)), count):
                yield [names[first : first + count] for names in of_ranks]

    def _update(
        self, wave: list[list[str]], group: dict[str, Any], momenta: Mapping[str, Tensor], masters: Mapping[str, Tensor]
    ) -> None:
        """Update this rank's rows of a wave in place.

        momenta, masters: By name; matrices without rows on this rank are missing.
        """
        shape = torch.Size(self._plan.shapes[next(name for names in wave for name in names)])
        rank = self._exchange.rank
        inputs = {name: self._input(name, group, momenta) for names in wave for name in names}
        stack = next(iter(inputs.values())).new_empty(len(wave[rank]), *shape)
        own = {name: self._rows(matrix, name) for name, matrix in zip(wave[rank], stack, strict=True)}
        for name, rows in own.items():
            rows[rank].copy_(inputs[name])
        self._exchange.move(
            [(owner, inputs[name]) for owner, names in enumerate(wave) for name in names],
            [(other, own[name][other]) for name in wave[rank] for other in range(self._exchange.count)],
        )
        updates = newton_schulz(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
        own = {name: self._rows(matrix, name) for name, matrix in zip(wave[rank], updates, strict=True)}
        self._exchange.move(
            [(other, own[name][other]) for name in wave[rank] for other in range(self._exchange.count)],
            [(owner, inputs[name]) for owner, names in enumerate(wave) for name in names],
        )
        for name, arrived in inputs.items():
            if name not in momenta:
                continue
            master = masters[name]
            master.mul_(1 - group["lr"] * group["weight_decay"])
            kept = own[name][rank] if name in own else arrived
            master.add_(kept, alpha=-adjusted(group["lr"], group["adjust_lr_fn"], shape))

    def _input(self, name: str, group: dict[str, Any], momenta: Mapping[str, Tensor]) -> Tensor:
        """Update the momentum, and return this rank's rows of the matrix to orthogonalize as a new bf16 tensor."""
        gradient, momentum = self._matrices[name].grad, group["momentum"]
        assert gradient is not None
        if name not in momenta:
            return gradient.bfloat16()
        buffer = momenta[name]
        buffer.lerp_(gradient, 1 - momentum)
        return (gradient.lerp(buffer, momentum) if group["nesterov"] else buffer).bfloat16()

    def _rows(self, matrix: Tensor, name: str) -> list[Tensor]:
        """Return views of the whole matrix: the rows of each rank."""
        return [matrix[rows.start : rows.stop] for rows in self._plan.cut(name)]
