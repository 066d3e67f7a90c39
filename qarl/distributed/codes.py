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
from qarl_formats.stacked import Form, rows_of, slices
from torch import Tensor

from qarl.distributed.exchange import Exchange, Pending
from qarl.distributed.rows import RowPlan
from qarl.experts import experts_of
from qarl.fused import fused_groups, shared_scales
from qarl.weight_sync.joined import RUN_BYTES
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
    runs = {run[0]: run for run in even_runs(plan, scheme_of)}
    rest = {name for run in runs.values() for name in run[1:]}
    for name in plan.shapes:
        if name in runs:
            gather.add_run(runs[name], [shards[one] for one in runs[name]])
        elif name not in rest:
            gather.add(name, shards[name])
    return gather.snapshot(shards.__getitem__)


def even_runs(plan: RowPlan, scheme_of: SchemeOf, most: int = RUN_BYTES) -> Iterator[list[str]]:
    """Experts' weights of a layer, in runs of at least two, that are gathered in one message: those of one shape and
    scheme, of which every rank holds as many rows. most: bytes of one rank's float32 rows."""
    quantized = [name for name in plan.shapes if scheme_of(name) is not None]
    for group in fused_groups(name.removesuffix(".weight") for name in quantized):
        names = [f"{module}.weight" for module in group]
        cut, shape, scheme = plan.cut(names[0]), plan.shapes[names[0]], scheme_of(names[0])
        if experts_of(group[0].rpartition(".")[0]) is None or len({len(rows) for rows in cut}) > 1 or not cut[0]:
            continue
        if any(plan.shapes[name] != shape or scheme_of(name) != scheme for name in names):
            continue
        count = max(most // (4 * len(cut[0]) * shape[1]), 1)
        for start in range(0, len(names), count):
            if len(run := names[start : start + count]) > 1:
                yield run


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
        self._under_way: deque[tuple[list[str], dict[str, Pending]]] = deque()
        self._forms: dict[str, Form] = {}
        self._runs: dict[str, list[str]] = {}  # by their first

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
        self._begun([name], gathering)

    @torch.no_grad()
    def add_run(self, names: list[str], rows: list[Tensor]) -> None:
        """As `add` of each, in one message. names, rows: a run of `even_runs`."""
        first, scheme = names[0], self.scheme_of(names[0])
        assert scheme is not None, f"{first} is not quantized"
        form = self._quantizer.form(first, torch.cat(rows), scheme, self._shared.get(first))
        assert isinstance(form, QuantizedWeight)
        self._runs[first] = names
        gathering = {}
        for suffix, own in form.tensors.items():
            if rows_of(scheme, suffix) is not None:
                cut = [range(rank * len(own), (rank + 1) * len(own)) for rank in range(self.exchange.count)]
                gathering[suffix] = self.exchange.begin_gather(own.contiguous(), cut)
        self._begun(names, gathering)

    def _begun(self, names: list[str], gathering: dict[str, Pending]) -> None:
        self._under_way.append((names, gathering))
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
        """Wait for the oldest codes, of a master or of a run of them."""
        names, gathering = self._under_way.popleft()
        name, scheme = names[0], self.scheme_of(names[0])
        if scheme is None:
            self._forms[name] = gathering[name].rows()
            return
        n, k = self.plan.shapes[name]
        n *= len(names)
        tensors: dict[str, Tensor] = {}
        for suffix in scheme.tensor_specs(n, k):
            if suffix in gathering:
                found = gathering[suffix].rows()
                if len(names) > 1:  # ranks, and in each the masters: to masters, and in each the ranks
                    parts = found.view(self.exchange.count, len(names), -1, *found.shape[1:])
                    found = parts.transpose(0, 1).contiguous().view(found.shape)
                tensors[suffix] = found
            elif suffix == "weight_shape":
                tensors[suffix] = torch.tensor((n, k))
            else:
                device = next(iter(tensors.values())).device
                tensors[suffix] = self._shared[name].to(device, copy=True)
        whole = QuantizedWeight(scheme, tensors, (n, k))
        if len(names) == 1:
            self._forms[name] = whole
        else:
            self._forms |= zip(names, slices(whole, [n // len(names)] * len(names)), strict=True)

    @torch.no_grad()
    def snapshot(self, rows_of_master: Callable[[str], Tensor]) -> Snapshot:
        """What was gathered, of all masters of the plan. A collective, which waits for the device once.

        rows_of_master: what `add` was given; asked for of a master that is not finite, to count.
        Raises UserError for the first master in the plan's order that is not finite, on every rank the same one.
        """
        while self._under_way:
            self._finish()
        names, flags = self._quantizer.faults()
        told = zip(names, self.exchange.largest(flags).tolist(), strict=True)
        faulty = {one for name, flag in told if flag for one in self._runs.get(name, [name])}
        for name in filter(faulty.__contains__, self.plan.shapes):
            self._refuse(name, rows_of_master(name))
        assert not faulty, "a value that is not finite and was not found again"
        return build_snapshot(self._quantizer.version, ((name, self._forms[name]) for name in self.plan.shapes))

    def _refuse(self, name: str, rows: Tensor) -> None:
        """Raise UserError where the master has values that are not finite, on every rank."""
        scheme, count = self.scheme_of(name), self.exchange.count
        own = self._quantizer.bad_values(rows, scheme).reshape(1)
        bad = int(self.exchange.gather_rows(own, [range(rank, rank + 1) for rank in range(count)]).sum())
        total = math.prod(self.plan.shapes[name])
        if bad:  # of a run any may have been meant
            raise not_finite(self._quantizer.version, name, scheme, self._quantizer.dtype, bad, total)
