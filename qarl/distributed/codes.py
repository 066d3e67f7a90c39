"""The codes of all rows on every rank: each quantizes the rows that it holds, and what is stored of them is gathered.

Rows of a weight are quantized by themselves, up to what a scheme stores for several of them, which a plan does not
separate, and what it shares over a whole tensor, which is agreed on first. So the stored tensors are bit for bit those
of one process that quantizes the whole masters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from qarl_formats.scheme import Scheme
from qarl_formats.weight import LowBitWeight
from torch import Tensor

from qarl.distributed.exchange import Exchange
from qarl.distributed.gathers import Gathers, own_rows
from qarl.distributed.rows import Block, RowPlan
from qarl.fused import shared_scales
from qarl.weight_sync.quantize import Quantizer, SchemeOf
from qarl.weight_sync.snapshot import Snapshot, build_snapshot


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
    """The whole snapshot on every rank, equal to what `quantize_parameters` makes of the whole masters. A collective.

    shards: this rank's rows of each master by name, float32; asked for block by block in the plan's order, and twice
    where a scheme has one scale for a tensor. The rest is as `quantize_parameters` takes it. Raises UserError as that
    does, on every rank the same one.
    """
    shared = shared_over_ranks(shards, plan, exchange, scheme_of)
    gather = _CodeGather(shards, plan, exchange, scheme_of, Quantizer(dtype, version, kernels), shared)
    for block in plan.blocks:
        gather.add(block)
    return gather.snapshot()


def shared_over_ranks(
    shards: Mapping[str, Tensor], plan: RowPlan, exchange: Exchange, scheme_of: SchemeOf
) -> dict[str, Tensor]:
    """What each block's weights are quantized with in common, and with those they are fused with, by the block's first
    name.

    Weights of schemes that share nothing over a tensor are left out. A collective, of the largest magnitudes alone.
    """
    schemes = {block: scheme for block in plan.blocks if (scheme := scheme_of(block[0])) is not None}
    schemes = {block: scheme for block, scheme in schemes.items() if scheme.shared([torch.zeros(1, 1)]) is not None}
    if not schemes:
        return {}
    own = torch.stack([_largest(block, plan, exchange.rank, shards) for block in schemes])
    # All that a scheme makes of weights in common depends on their largest magnitude, so that may stand for them.
    names = [block[0] for block in schemes]
    largest = dict(zip(names, exchange.largest(own.nan_to_num(torch.inf, torch.inf)).split(1), strict=True))
    found: dict[str, Tensor] = {}
    for name, scheme in zip(names, schemes.values(), strict=True):
        alone = scheme.shared([largest[name]])
        assert alone is not None
        found[name] = alone
    for scheme in dict.fromkeys(schemes.values()):  # a stack has all that it is fused with
        lone = [block[0] for block, its in schemes.items() if its == scheme and len(block) == 1]
        found |= shared_scales((name.removesuffix(".weight") for name in lone), scheme, largest.__getitem__)
    return found


def _largest(block: Block, plan: RowPlan, rank: int, shards: Mapping[str, Tensor]) -> Tensor:
    """The largest magnitude of this rank's rows, float32 []; 0 of no rows."""
    found = [
        torch.linalg.vector_norm(rows.detach(), torch.inf) if rows.numel() else rows.new_zeros(())
        for _, rows in own_rows(block, plan, rank, shards)
    ]
    return torch.stack(found).amax()


class _CodeGather:
    """A snapshot that is gathered one block of masters after the other, in an order that is the same on all ranks.

    shared: what `shared_over_ranks` gave. The rest is as `gather_codes` takes it. Raises UserError where a scheme does
    not fit a master.
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
        self._gathers = Gathers(exchange)
        self._stored: dict[Block, dict[str, Tensor]] = {}  # what has rows, by suffix; of no scheme the values, by ""

    def add(self, block: Block) -> None:
        """Quantize this rank's rows of a block, and begin to gather their codes."""
        scheme = self._scheme_of(block[0])
        for places, rows in own_rows(block, self._plan, self._exchange.rank, self._shards):
            if block not in self._stored:
                self._stored[block] = self._empty(block, scheme, rows.device)
            made = self._made(block, rows.detach(), scheme)
            for suffix, out in self._stored[block].items():
                features = 1 if scheme is None else scheme.rows_per_entry(suffix) or 1
                cut = [range(math.ceil(some.start / features), math.ceil(some.stop / features)) for some in places]
                self._gathers.add(made[suffix].contiguous() if made else out[:0], cut, out)

    def _empty(self, block: Block, scheme: Scheme | None, device: torch.device) -> dict[str, Tensor]:
        """Memory for what is stored of all rows."""
        shape = self._plan.block_shape(block)
        if scheme is None:
            return {"": torch.empty(shape, dtype=self._quantizer.dtype, device=device)}
        n, k = shape
        return {
            suffix: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for suffix, spec in scheme.tensor_specs(n, k).items()
            if scheme.rows_per_entry(suffix) is not None
        }

    def _made(self, block: Block, rows: Tensor, scheme: Scheme | None) -> Mapping[str, Tensor]:
        """What is stored of rows, by suffix; nothing of no rows of a scheme."""
        if scheme is not None and not len(rows):
            self._quantizer.nothing(block[0], rows.device)
            return {}
        form = self._quantizer.quantize(block[0], rows, scheme, self._shared.get(block[0]))
        return {"": form} if isinstance(form, Tensor) else form.tensors

    def snapshot(self) -> Snapshot:
        """What was gathered, of all masters of the plan. A collective, which waits for the device once.

        Raises UserError for the first master in the plan's order that is not finite, on every rank the same one.
        """
        self._gathers.finish()
        names, flags = self._quantizer.faults()
        members = {block[0]: block for block in self._plan.blocks}
        told = zip(names, self._exchange.largest(flags).tolist(), strict=True)
        faulty = {one for name, flag in told if flag for one in members[name]}
        for name in filter(faulty.__contains__, self._plan.shapes):
            self._refuse(name)
        assert not faulty, "a value that is not finite and was not found again"
        forms: dict[str, LowBitWeight | Tensor] = {}
        for block in self._plan.blocks:
            whole = self._whole(block)
            rows = [self._plan.shapes[name][0] for name in block]
            forms |= zip(block, whole.split(rows) if len(block) > 1 else [whole], strict=True)
        return build_snapshot(self._quantizer.version, ((name, forms.pop(name)) for name in self._plan.shapes))

    def _whole(self, block: Block) -> LowBitWeight | Tensor:
        """What is published of a block's weights as one."""
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
        """Raise UserError where the master has values that are not finite, on every rank."""
        scheme, count = self._scheme_of(name), self._exchange.count
        own = self._quantizer.bad_values(self._shards[name], scheme).reshape(1)
        bad = int(self._exchange.gather_rows(own, [range(rank, rank + 1) for rank in range(count)]).sum())
        total = math.prod(self._plan.shapes[name])
        if bad:  # of a stack any may have been meant
            raise self._quantizer.refusal(name, scheme, bad, total)
