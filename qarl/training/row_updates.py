"""Sharded optimizer engine (ZeRO-3 style): gradients, optimizer and master weights sharded along dimension 0.

After an optimizer step each rank quantizes its rows, and all ranks gather the codes. Codes have a fraction of the bytes
of master weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qarl.config import Config
from qarl.distributed.exchange import Exchange
from qarl.distributed.ranks import Ranks
from qarl.distributed.rows import RowPlan
from qarl.policy.policy import Policy
from qarl.policy.skeleton import drop_values
from qarl.storage.pieces import Piece
from qarl.training.loss_scale import LossScale
from qarl.training.offload_muon import OffloadedRowMuon
from qarl.training.optim import build_optimizer, clip_grads, is_hidden_matrix
from qarl.training.row_muon import RowMuon
from qarl.training.row_sums import RowSums
from qarl.training.updates import Updates, on_device
from qarl.weight_sync.codes import gather_codes
from qarl.weight_sync.gathers import BucketedGather, own_rows


class RowUpdates(Updates):
    """Optimizer engine in which each rank holds rows of every master weight.

    A step has the same bits as in a single process that sums the micro-batches in the same order: round by round, and
    in rank order within a round.

    Args:
        policy: The policy. Its parameters become placeholders (`qarl.policy.skeleton`).
        rows: This rank's rows of each master weight by name, float32 on the policy's device. They are updated in place.
        plan: Assignment of rows to ranks.
        exchange: Moves rows between ranks.
        ranks: All ranks of the run.
        config: Configuration of the run.
    """

    def __init__(
        self,
        policy: Policy,
        rows: Mapping[str, Tensor],
        plan: RowPlan,
        exchange: Exchange,
        ranks: Ranks,
        config: Config,
    ) -> None:
        self.policy, self.plan, self.exchange, self.ranks, self.config = policy, plan, exchange, ranks, config
        self.scale = LossScale.of(config)
        named = dict(policy.named_parameters())
        self.shards = {name: nn.Parameter(rows[name].detach()) for name in named}
        drop_values(named.values(), policy.device)
        self._sums = RowSums(policy, plan, exchange)
        # A rank may have no rows of a small master weight, and then has no optimizer state for it.
        self._own_shards = {name: shard for name, shard in self.shards.items() if shard.numel()}
        hidden = {name: self.shards[name] for name, master in named.items() if is_hidden_matrix(name, master)}
        kind = OffloadedRowMuon if config.optim.offload else RowMuon
        muon = partial(kind, matrices=hidden, plan=plan, exchange=exchange)
        self.optimizer = build_optimizer(self._own_shards.items(), config.optim, muon)
        self.kind = self.optimizer.kind

    def clear(self) -> None:
        self._sums.take()
        self._drop_gradients()

    def backward(self, loss: Tensor | None) -> None:
        self._sums.round(None if loss is None else self.scale.scaled(loss))

    @torch.no_grad()
    def norm(self) -> float:
        sums = self._sums.take()
        if self.scale.value != 1.0 and sums:
            torch._foreach_div_(list(sums.values()), self.scale.value)
        for name, shard in self.shards.items():
            shard.grad = sums.get(name)
        gradients = [shard.grad for shard in self._own_shards.values() if shard.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).tolist() if gradients else []
        return joint_norm([norm for own in self.ranks.gather(norms) for norm in own])

    def set_lr(self, factor: float) -> None:
        self.optimizer.set_lr(factor)

    def step(self, norm: float) -> None:
        self.begun += 1
        clip_grads(self._own_shards.values(), norm, self.config.optim.max_grad_norm)
        self.optimizer.step()
        self._drop_gradients()
        self._publish(self.policy.version + 1)

    def pieces(self) -> tuple[list[Piece], dict[str, Any]]:
        state, meta = self.optimizer.state_tensors()
        found = [self._piece("masters", name, name, rows) for name, rows in self._rows().items() if rows.numel()]
        for full_name, value in state.items():
            name, _, key = full_name.rpartition("/")
            if key != "step":
                found.append(self._piece("optimizer", full_name, name, value))
            elif self._start(name) == 0:  # the step is equal on all ranks; the one with the first row writes it
                found.append(Piece("optimizer", full_name, (), 0, value.reshape(1)))
        names = {name for own in self.ranks.gather(meta["tensors"]) for name in own}
        return found, {**meta, "tensors": sorted(names)}

    @torch.no_grad()
    def load(self, read: Callable[[str, str, int, int], Tensor], meta: dict[str, Any], version: int) -> None:
        elsewhere = self.shards.keys() - self._own_shards.keys()  # masters without rows on this rank
        own = {**meta, "tensors": [name for name in meta["tensors"] if name.rpartition("/")[0] not in elsewhere]}

        def part(full_name: str, shape: torch.Size) -> Tensor:
            start = self._start(full_name.rpartition("/")[0]) if shape else 0
            return read("optimizer", full_name, start, start + shape.numel()).view(shape)

        self.optimizer.load_state(own, part)
        for name, rows in self._rows().items():
            if rows.numel():
                start = self._start(name)
                rows.copy_(read("masters", name, start, start + rows.numel()).view_as(rows))
        self._publish(version)

    def _rows(self) -> dict[str, Tensor]:
        """Return this rank's rows of every master weight, on the device or on the host."""
        masters = self.optimizer.masters()
        return {name: masters.get(name, shard.detach()) for name, shard in self.shards.items()}

    def _drop_gradients(self) -> None:
        for shard in self.shards.values():
            shard.grad = None

    @torch.no_grad()
    def _publish(self, version: int) -> None:
        """Quantize the rows, gather all codes, and switch the policy to them."""
        policy = self.policy
        rows = on_device(self._rows(), policy.device)
        snapshot = gather_codes(rows, self.plan, self.exchange, policy.scheme_of, policy.dtype, version, policy.kernels)
        values = None if policy.aligned else rounded_values(rows, self.plan, self.exchange, policy.learner_dtype)
        policy.take(snapshot, values)

    def _start(self, name: str) -> int:
        """Return the offset, in elements, of this rank's rows in the flattened master weight."""
        return self.plan.cut(name)[self.ranks.rank].start * math.prod(self.plan.shapes[name][1:])

    def _piece(self, group: str, full_name: str, name: str, values: Tensor) -> Piece:
        return Piece(group, full_name, self.plan.shapes[name], self._start(name), values.reshape(-1))


def joint_norm(norms: list[float]) -> float:
    """Combine L2 norms (float64) of several tensors into one, rounded to float32, independent of their order."""
    return torch.tensor(math.sqrt(math.fsum(norm * norm for norm in norms)), dtype=torch.float32).item()


@torch.no_grad()
def rounded_values(
    rows: Mapping[str, Tensor], plan: RowPlan, exchange: Exchange, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gather all master weights in `dtype`, for a learner that does not run on quantized weights. A collective.

    Args:
        rows: This rank's rows of each master weight by name, float32.
        plan: Assignment of rows to ranks.
        exchange: Moves rows between ranks.
        dtype: dtype of the result.

    Returns:
        The whole master weights by name, on the device of the rows.
    """
    gathers = BucketedGather(exchange)
    found: dict[str, Tensor] = {}
    for block in plan.blocks:
        whole: Tensor | None = None
        for places, own in own_rows(block, plan, exchange.rank, rows):
            whole = own.new_empty(plan.block_shape(block), dtype=dtype) if whole is None else whole
            gathers.add(own.to(dtype), places, whole)
        assert whole is not None, "a block has rows on at least one rank"
        found |= zip(block, whole.split([plan.shapes[name][0] for name in block]), strict=True)
    gathers.finish()
    return found
