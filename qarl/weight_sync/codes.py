"""Quantize the masters of one policy version, once, for the learner's forward, publishes and exports.

With several ranks, each quantizes the rows it holds, and the stored tensors are gathered on all. Rows are quantized
independently, with two exceptions. A scheme may store one value for several rows; the row plan keeps such rows on one
rank. It may also store one value per tensor; the ranks compute it together first. So the stored tensors equal, bit for
bit, those of one process that quantizes the whole masters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from qarl_formats.scheme import Scheme
from qarl_formats.weight import LowBitWeight
from torch import Tensor

from qarl.distributed.exchange import Exchange, SingleProcessExchange
from qarl.distributed.rows import Block, RowPlan
from qarl.utils.packed_linears import fused_groups
from qarl.weight_sync.gathers import BucketedGather, own_rows
from qarl.weight_sync.quantize import Quantizer, SchemeOf
from qarl.weight_sync.snapshot import Snapshot, build_snapshot


def quantize_parameters(
    masters: Mapping[str, Tensor],
    plan: RowPlan,
    scheme_of: SchemeOf,
    dtype: torch.dtype,
    version: int,
    kernels: bool = False,
) -> Snapshot:
    """Quantize all masters in one process; see `gather_codes`. plan: `qarl.distributed.rows.plan_of` for one rank."""
    return gather_codes(masters, plan, SingleProcessExchange(), scheme_of, dtype, version, kernels)


@torch.no_grad()
def gather_codes(
    shards: Mapping[str, Tensor],
    plan: RowPlan,
    exchange: Exchange,
    scheme_of: SchemeOf,
    dtype: torch.dtype,
    version: int,
    kernels: bool = False,
) -> Snapshot:
    """Quantize all masters and return the whole snapshot on every rank. A collective.

    The stored tensors are those of `quantize_parameter`, but this synchronizes with the GPU only once, at the end. The
    experts of a layer are quantized together: a mixture has thousands of small matrices, and launching kernels for each
    would take longer than the computation.

    Args:
        shards: This rank's rows of each master by name, float32; read in the same order on all ranks, and twice if
            they share a scale. They are not changed, and the snapshot shares no memory with them.
        plan: Assignment of rows to ranks.
        exchange: Gathers the stored tensors.
        scheme_of: Returns the scheme of a parameter; None if it is not quantized.
        dtype: dtype of unquantized parameters.
        version: Policy version.
        kernels: See `quantize_parameter`.

    Raises:
        UserError: As for `quantize_parameter`, for the first master that is not finite, the same on every rank.
    """
    shared = shared_over_ranks(shards, plan, exchange, scheme_of)
    gather = _CodeGather(shards, plan, exchange, scheme_of, Quantizer(dtype, version, kernels), shared)
    for block in plan.blocks:
        gather.add(block)
    return gather.snapshot()


def shared_over_ranks(
    shards: Mapping[str, Tensor], plan: RowPlan, exchange: Exchange, scheme_of: SchemeOf
) -> dict[str, Tensor]:
    """Return the value shared by the weights of each block and those fused with them, by the block's first name.

    A collective. It sends only maximum magnitudes, because a shared value depends on nothing else. Leaves out schemes
    without per-tensor values. With one rank it also leaves out single weights: `Scheme.quantize` computes their value.
    """
    blocks_of: dict[Scheme, list[Block]] = {}
    for block in plan.blocks:
        if (scheme := scheme_of(block[0])) is not None:
            blocks_of.setdefault(scheme, []).append(block)
    found: dict[str, Tensor] = {}
    for scheme, blocks in blocks_of.items():
        if scheme.shared([torch.zeros(1, 1)]) is None:
            continue
        lone: dict[str, Block] = {block[0].removesuffix(".weight"): block for block in blocks if len(block) == 1}
        groups: list[list[Block]] = [[lone.pop(name) for name in names] for names in fused_groups(lone)]
        groups += [[block] for block in blocks if len(block) > 1]  # all experts of a layer are one block
        groups += [[block] for block in lone.values() if exchange.count > 1]
        if not groups:
            continue
        own = torch.stack([_largest(block, plan, exchange.rank, shards) for group in groups for block in group])
        largest = exchange.largest(own.nan_to_num(torch.inf, torch.inf)).split([len(group) for group in groups])
        for group, maxima in zip(groups, largest, strict=True):
            value = scheme.shared([maxima])
            assert value is not None
            found |= dict.fromkeys((block[0] for block in group), value)
    return found


def _largest(block: Block, plan: RowPlan, rank: int, shards: Mapping[str, Tensor]) -> Tensor:
    """Return the maximum magnitude of this rank's rows, float32 []; 0 without rows."""
    found = [
        torch.linalg.vector_norm(rows.detach(), torch.inf) if rows.numel() else rows.new_zeros(())
        for _, rows in own_rows(block, plan, rank, shards)
    ]
    return found[0] if len(found) == 1 else torch.stack(found).amax()


class _CodeGather:
    """Gathers a snapshot block by block, in the same order on all ranks.

    shared: result of `shared_over_ranks`. The rest as in `gather_codes`. Raises UserError if a scheme does not fit a
    master.
    """

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        plan: RowPlan,
        exchange: Exchange,
        scheme_of: SchemeOf,
        quantizer: Quantizer,
        shared: Mapping[str, Tensor],
    ) -> None:
        self._shards, self._plan, self._exchange, self._scheme_of = shards, plan, exchange, scheme_of
        self._quantizer, self._shared = quantizer, shared
        for name, shape in plan.shapes.items():
            quantizer.check(name, shape, scheme_of(name))
        self._gathers = BucketedGather(exchange)
        self._stored: dict[Block, dict[str, Tensor]] = {}  # tensors with rows by suffix; unquantized values as ""

    def add(self, block: Block) -> None:
        """Quantize this rank's rows of a block and start to gather them."""
        scheme = self._scheme_of(block[0])
        for places, rows in own_rows(block, self._plan, self._exchange.rank, self._shards):
            quantized = self._quantized(block, rows.detach(), scheme)
            if self._exchange.count == 1 and len(rows) == self._plan.block_shape(block)[0] and quantized:
                self._stored[block] = dict(quantized)  # nothing to gather
                return
            if block not in self._stored:
                self._stored[block] = self._empty(block, scheme, rows.device)
            for suffix, out in self._stored[block].items():
                unit = 1 if scheme is None else scheme.rows_per_entry(suffix) or 1
                cut = [range(math.ceil(some.start / unit), math.ceil(some.stop / unit)) for some in places]
                self._gathers.add(quantized[suffix].contiguous() if quantized else out[:0], cut, out)

    def _empty(self, block: Block, scheme: Scheme | None, device: torch.device) -> dict[str, Tensor]:
        """Allocate the stored tensors of all rows."""
        shape = self._plan.block_shape(block)
        if scheme is None:
            return {"": torch.empty(shape, dtype=self._quantizer.dtype, device=device)}
        n, k = shape
        return {
            suffix: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for suffix, spec in scheme.tensor_specs(n, k).items()
            if scheme.rows_per_entry(suffix) is not None
        }

    def _quantized(self, block: Block, rows: Tensor, scheme: Scheme | None) -> Mapping[str, Tensor]:
        """Return the stored tensors of some rows by suffix; empty if a quantized weight has no rows on this rank."""
        if scheme is not None and not len(rows):
            self._quantizer.add_no_rows(block[0], rows.device)
            return {}
        weight = self._quantizer.quantize(block[0], rows, scheme, self._shared.get(block[0]))
        return {"": weight} if isinstance(weight, Tensor) else weight.tensors

    def snapshot(self) -> Snapshot:
        """Return the snapshot of all masters of the plan. A collective; synchronizes with the device once.

        Raises UserError for the first master in the plan's order that is not finite, the same on every rank.
        """
        self._gathers.finish()
        names, flags = self._quantizer.faults()
        members = {block[0]: block for block in self._plan.blocks}
        flagged = zip(names, self._exchange.largest(flags).tolist(), strict=True)
        faulty = {one for name, flag in flagged if flag for one in members[name]}
        for name in filter(faulty.__contains__, self._plan.shapes):
            self._refuse(name)
        assert not faulty, f"flagged as not finite, but no bad value was found: {faulty}"
        parameters: dict[str, LowBitWeight | Tensor] = {}
        for block in self._plan.blocks:
            whole = self._whole(block)
            rows = [self._plan.shapes[name][0] for name in block]
            parameters |= zip(block, whole.split(rows) if len(block) > 1 else [whole], strict=True)
        # `pop`: the snapshot may then free a tensor after copying it.
        return build_snapshot(self._quantizer.version, ((name, parameters.pop(name)) for name in self._plan.shapes))

    def _whole(self, block: Block) -> LowBitWeight | Tensor:
        """Return the weights of a block as one weight."""
        scheme, stored = self._scheme_of(block[0]), self._stored.pop(block)
        if scheme is None:
            return stored[""]
        n, k = self._plan.block_shape(block)
        tensors: dict[str, Tensor] = {}
        for suffix in scheme.tensor_specs(n, k):
            if suffix in stored:
                tensors[suffix] = stored[suffix]
            elif suffix == "weight_shape":
                tensors[suffix] = torch.tensor((n, k))
            else:
                device = next(iter(stored.values())).device
                tensors[suffix] = self._shared[block[0]].to(device, copy=True)
        return LowBitWeight(scheme, tensors, (n, k))

    def _refuse(self, name: str) -> None:
        """Raise UserError on every rank if the master has values that are not finite."""
        scheme, count = self._scheme_of(name), self._exchange.count
        own = self._quantizer.bad_values(self._shards[name], scheme).reshape(1)
        bad = int(self._exchange.gather_rows(own, [range(rank, rank + 1) for rank in range(count)]).sum())
        total = math.prod(self._plan.shapes[name])
        if bad:  # a block has one flag, so another master of the block may be the faulty one
            raise self._quantizer.refusal(name, scheme, bad, total)
