"""The codes of all rows on every rank: each quantizes the rows that it holds, and what is stored of them is gathered.

Rows of a weight are quantized by themselves, up to what a scheme stores for several of them, which a plan does not
separate, and what it shares over a whole tensor, which is agreed on first. So the stored tensors are bit for bit those
of one process that quantizes the whole masters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch
from qarl_formats.quantize import QuantizedWeight
from qarl_formats.scheme import Scheme
from qarl_formats.stacked import Form, rows_of
from torch import Tensor

from qarl.distributed.exchange import Exchange, Pending
from qarl.distributed.rows import RowPlan
from qarl.fused import shared_scales
from qarl.weight_sync.snapshot import Quantizer, Snapshot, build_snapshot, not_finite

SchemeOf = Callable[[str], Scheme | None]
IN_FLIGHT = 2  # masters whose codes are under way while the next one is quantized


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

    shards: this rank's rows of each master by name, in the plan's order, float32; asked for one at a time, and twice
    where a scheme has one scale for a tensor. The rest is as `quantize_parameters` takes it. Raises UserError as that
    does, on every rank the same one.
    """
    shared = shared_over_ranks(shards, plan, exchange, scheme_of)
    gather = CodeGather(plan, exchange, scheme_of, dtype, version, kernels, shared)
    for name in plan.shapes:
        gather.add(name, shards[name])
    return gather.snapshot(shards.__getitem__)


@torch.no_grad()
def shared_over_ranks(
    shards: Mapping[str, Tensor], plan: RowPlan, exchange: Exchange, scheme_of: SchemeOf
) -> dict[str, Tensor]:
    """By name what each weight is quantized with in common with the rest of it and with those it is fused with.

    Weights of schemes that share nothing over a tensor are left out. A collective, of the largest magnitudes alone.
    """
    schemes = {name: scheme for name in plan.shapes if (scheme := scheme_of(name)) is not None}
    schemes = {name: scheme for name, scheme in schemes.items() if scheme.shared([torch.zeros(1, 1)]) is not None}
    if not schemes:
        return {}
    own = torch.stack([_largest(shards[name].detach()) for name in schemes])
    # All that a scheme makes of weights in common depends on their largest magnitude, so that may stand for them.
    largest = dict(zip(schemes, exchange.largest(own.nan_to_num(torch.inf, torch.inf)).split(1), strict=True))
    found: dict[str, Tensor] = {}
    for name, scheme in schemes.items():
        alone = scheme.shared([largest[name]])
        assert alone is not None
        found[name] = alone
    for scheme in dict.fromkeys(schemes.values()):
        modules = (name.removesuffix(".weight") for name, its in schemes.items() if its == scheme)
        found |= shared_scales(modules, scheme, largest.__getitem__)
    return found


def _largest(rows: Tensor) -> Tensor:
    """The largest magnitude, float32 []; 0 of no rows."""
    return torch.linalg.vector_norm(rows, torch.inf) if rows.numel() else rows.new_zeros(())


class CodeGather:
    """A snapshot that is gathered one master after the other, in any order that is the same on all ranks.

    shared: what `shared_over_ranks` gave. The rest is as `gather_codes` takes it. Raises UserError where a scheme does
    not fit a master.
    """

    def __init__(
        self,
        plan: RowPlan,
        exchange: Exchange,
        scheme_of: SchemeOf,
        dtype: torch.dtype,
        version: int,
        kernels: bool = False,
        shared: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.plan, self.exchange, self.scheme_of = plan, exchange, scheme_of
        self._shared = shared or {}
        self._quantizer = Quantizer(dtype, version, kernels)
        for name, shape in plan.shapes.items():
            self._quantizer.check(name, shape, scheme_of(name))
        self._under_way: deque[tuple[str, dict[str, Pending]]] = deque()
        self._forms: dict[str, Form] = {}

    @torch.no_grad()
    def add(self, name: str, rows: Tensor) -> None:
        """Quantize this rank's rows of a master, float32 on the exchange's device, and begin to gather their codes."""
        cut, scheme = self.plan.cut(name), self.scheme_of(name)
        assert len(rows) == len(cut[self.exchange.rank]), (
            f"{name}: {len(rows)} rows of {cut}, rank {self.exchange.rank}"
        )
        if scheme is None:
            value = self._quantizer.form(name, rows, None, None)
            assert isinstance(value, Tensor)
            gathering = {name: self.exchange.begin_gather(value, cut)}
        else:
            gathering = dict(self._stored(name, rows, scheme))
        self._under_way.append((name, gathering))
        if len(self._under_way) > IN_FLIGHT:
            self._finish()

    def _stored(self, name: str, rows: Tensor, scheme: Scheme) -> Iterator[tuple[str, Pending]]:
        """The stored tensors that have rows, on their way, by suffix."""
        own: dict[str, Tensor] = {}
        if len(rows):
            form = self._quantizer.form(name, rows, scheme, self._shared.get(name))
            assert isinstance(form, QuantizedWeight)
            own = form.tensors
        else:
            self._quantizer.nothing(name, rows.device)
        cut, (n, k) = self.plan.cut(name), self.plan.shapes[name]
        for suffix, spec in scheme.tensor_specs(n, k).items():
            features = rows_of(scheme, suffix)
            if features is None:
                continue
            if not own:
                own_rows = torch.empty(0, *spec.shape[1:], dtype=getattr(torch, spec.dtype), device=rows.device)
            else:
                own_rows = own[suffix].contiguous()
            stored = [range(math.ceil(some.start / features), math.ceil(some.stop / features)) for some in cut]
            yield suffix, self.exchange.begin_gather(own_rows, stored)

    def _finish(self) -> None:
        """Wait for the oldest master's codes."""
        name, gathering = self._under_way.popleft()
        scheme = self.scheme_of(name)
        if scheme is None:
            self._forms[name] = gathering[name].rows()
            return
        n, k = self.plan.shapes[name]
        tensors: dict[str, Tensor] = {}
        for suffix in scheme.tensor_specs(n, k):
            if suffix in gathering:
                tensors[suffix] = gathering[suffix].rows()
            elif suffix == "weight_shape":
                tensors[suffix] = torch.tensor((n, k))
            else:
                device = next(iter(tensors.values())).device
                tensors[suffix] = self._shared[name].to(device, copy=True)
        self._forms[name] = QuantizedWeight(scheme, tensors, (n, k))

    @torch.no_grad()
    def snapshot(self, rows_of_master: Callable[[str], Tensor]) -> Snapshot:
        """What was gathered, of all masters of the plan. A collective, which waits for the device once.

        rows_of_master: what `add` was given; asked for of a master that is not finite, to count.
        Raises UserError for the first master in the plan's order that is not finite, on every rank the same one.
        """
        while self._under_way:
            self._finish()
        names, flags = self._quantizer.faults()
        faulty = {name for name, flag in zip(names, self.exchange.largest(flags).tolist(), strict=True) if flag}
        for name in filter(faulty.__contains__, self.plan.shapes):
            self._refuse(name, rows_of_master(name))
        return build_snapshot(self._quantizer.version, ((name, self._forms[name]) for name in self.plan.shapes))

    def _refuse(self, name: str, rows: Tensor) -> None:
        scheme, count = self.scheme_of(name), self.exchange.count
        own = self._quantizer.bad_values(rows, scheme).reshape(1)
        bad = int(self.exchange.gather_rows(own, [range(rank, rank + 1) for rank in range(count)]).sum())
        total = math.prod(self.plan.shapes[name])
        raise not_finite(self._quantizer.version, name, scheme, self._quantizer.dtype, bad, total)
