"""Optimizer steps of a tiny policy whose master weights are sharded over ranks, and the same in one process."""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from policy_models import batch
from qarl_kernels.logprob import Truncation
from tiny_runs import settings
from torch import Tensor

from qarl.config import Config
from qarl.distributed.exchange import Exchange, GroupExchange, SingleProcessExchange
from qarl.distributed.ranks import Ranks
from qarl.distributed.rows import plan_of
from qarl.memory.sizes import decide_sizes
from qarl.policy.gradients import GradientAccumulator
from qarl.policy.load import load_model
from qarl.policy.policy import Policy
from qarl.training.optim import build_optimizer, clip_grads
from qarl.training.row_setup import build_rows
from qarl.training.row_updates import RowUpdates, joint_norm
from qarl.training.setup import build_policy

CPU = torch.device("cpu")
PARTS = [[0], [1, 2], [3], [4], [5, 6]]  # of `batch`; on two and on three ranks the last round is not of all


@dataclass(frozen=True)
class Case:
    """sections: Sections of the configuration. broken: (step, rank) whose gradient is not finite."""

    model: str
    sections: dict[str, Any] = field(default_factory=dict)
    steps: int = 2
    broken: tuple[int, int] | None = None

    @property
    def config(self) -> Config:
        optim = {"lr": 1e-3, "max_grad_norm": 0.5, **self.sections.get("optim", {})}
        sections = {"quant": {"scheme": "w4a16", "group_size": 32}, **self.sections, "optim": optim}
        data = settings(Path(self.model), **sections)
        if "group_size" not in sections["quant"]:
            data["quant"].pop("group_size", None)
        return decide_sizes(Config.model_validate(data), "cpu")


def exchange_of(ranks: Ranks) -> SingleProcessExchange | GroupExchange:
    return SingleProcessExchange() if ranks.count == 1 else GroupExchange(ranks.tensors, ranks.rank, ranks.count, CPU)


def rounds(count: int) -> list[list[list[int] | None]]:
    """Return the part of each rank per round; None if the rank has none left."""
    dealt = [PARTS[rank::count] for rank in range(count)]
    return [[own[r] if r < len(own) else None for own in dealt] for r in range(max(map(len, dealt)))]


def loss_of(policy: Policy, part: list[int], factor: float = 1.0) -> Tensor:
    prompts, responses = batch()
    logp, _ = policy.logprobs([prompts[i] for i in part], [responses[i] for i in part], Truncation(), 64)
    advantages = torch.linspace(-1.0, 1.6, len(prompts), device=logp.device)
    weights = torch.cat([advantages[i].expand(len(responses[i])) for i in part])
    return -(logp * weights).sum() * (factor / sum(map(len, responses)))


@contextmanager
def offloading() -> Iterator[None]:
    """Accept `optim.offload` on a CPU."""
    with mock.patch("qarl.training.optim._require_device"):
        yield


def trained(
    ranks: Ranks, case: Case, device: torch.device = CPU, exchange: Exchange | None = None
) -> tuple[dict[str, Any], Policy, RowUpdates]:
    """Return this rank's norms, code digests and held pieces: group/name -> [start, stop, shape, sha256]."""
    policy, updates = build_rows(case.config, device, None, exchange or exchange_of(ranks), ranks)
    updates.set_lr(1.0)
    norms, digests, losses = [], [policy.current.manifest().digest()], []
    for step in range(case.steps):
        updates.clear()
        for own in rounds(ranks.count):
            factor = math.nan if [step, ranks.rank] == list(case.broken or ()) else 1.0
            part = own[ranks.rank]
            loss = None if part is None else loss_of(policy, part, factor)
            losses.append(None if loss is None else loss.item())
            updates.backward(loss)
        norm = updates.norm()
        norms.append(norm if math.isfinite(norm) else None)
        updates.step(norm) if math.isfinite(norm) else updates.clear()
        digests.append(policy.current.manifest().digest())
    return {"norms": norms, "digests": digests, "losses": losses, **held(updates)}, policy, updates


def held(updates: RowUpdates) -> dict[str, Any]:
    pieces, meta = updates.pieces()
    return {
        "pieces": {f"{p.group}/{p.name}": [p.start, p.start + len(p.values), p.shape, sha(p.values)] for p in pieces},
        "state": meta["tensors"],
        "begun": updates.begun,
    }


def assert_held(ranks: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
    """The pieces that ranks hold (`held`) have the bits of the tensors, and contain each of their values once."""
    spans: dict[str, list[tuple[int, int]]] = {what: [] for what in tensors}
    for rank in ranks:
        for what, (start, stop, shape, digest) in rank["pieces"].items():
            assert tuple(shape) == tensors[what].shape, what
            assert digest == sha(tensors[what].reshape(-1)[start:stop]), what
            spans[what].append((start, stop))
    for what, parts in spans.items():
        ends = [0, *(stop for _, stop in sorted(parts))]
        assert [start for start, _ in sorted(parts)] == ends[:-1] and ends[-1] == tensors[what].numel(), what


def assert_twins(ranks: list[dict[str, Any]], one: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    """Ranks (`trained`) have the norms, codes and optimizer state of one process (`twin`), to the bit."""
    for rank in ranks:
        for what in ("norms", "digests", "state", "begun"):
            assert rank[what] == one[0][what], what
    assert_held(ranks, one[1])


def sha(values: Tensor) -> str:
    return hashlib.sha256(values.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def twin(
    case: Case, count: int, device: torch.device = CPU, by_rank: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One process that sums the same parts in the same order: the result of `trained`, and all tensors by group/name.

    by_rank: Sum each rank's parts first and then the ranks, instead of the ranks of each round.
    """
    config = case.config
    policy = build_policy(config, load_model(config.model), device)
    named = dict(policy.named_parameters())
    masters = list(named.values())
    optimizer = build_optimizer(named.items(), config.optim)
    optimizer.set_lr(1.0)
    plan = plan_of({name: master.shape for name, master in named.items()}, policy.scheme_of, count)
    norms, digests, losses = [], [policy.current.manifest().digest()], []
    for step in range(case.steps):
        totals: list[Tensor] = []
        order = [[[] if part is None else [part] for part in own] for own in rounds(count)]
        for own in [[list(chain(*parts)) for parts in zip(*order, strict=True)]] if by_rank else order:
            sums: list[Tensor] = []
            for rank, parts in enumerate(own):
                accumulator = GradientAccumulator(masters)
                for part in parts:
                    loss = loss_of(policy, part, math.nan if (step, rank) == case.broken else 1.0)
                    losses.append(loss.item())
                    accumulator.backward(loss * config.loss_scale)
                found = [
                    torch.zeros_like(m) if g is None else g for m, g in zip(masters, accumulator.take(), strict=True)
                ]
                sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
            totals = [a + b for a, b in zip(totals, sums, strict=True)] if totals else sums
        for master, total in zip(masters, totals, strict=True):
            master.grad = total / config.loss_scale
        cuts = [(name, rows) for rank in range(count) for name in named for rows in [plan.cut(name)[rank]] if rows]
        gradients = [named[name].grad[rows.start : rows.stop] for name, rows in cuts]
        norm = joint_norm([torch.linalg.vector_norm(gradient, dtype=torch.float64).item() for gradient in gradients])
        norms.append(norm if math.isfinite(norm) else None)
        if math.isfinite(norm):
            clip_grads(masters, norm, config.optim.max_grad_norm)
            optimizer.step()
            policy.refresh(policy.version + 1)
        optimizer.zero_grad()
        digests.append(policy.current.manifest().digest())
    state, meta = optimizer.state_tensors()
    tensors = {f"masters/{name}": master.detach() for name, master in named.items()}
    tensors |= {f"optimizer/{name}": value for name, value in state.items()}
    begun = sum(norm is not None for norm in norms)
    found = {"norms": norms, "digests": digests, "losses": losses, "state": meta["tensors"], "begun": begun}
    return found, tensors


def reader(tensors: dict[str, Tensor]) -> Callable[[str, str, int, int], Tensor]:
    """Return a reader for `Updates.load`."""
    return lambda group, name, start, stop: tensors[f"{group}/{name}"].reshape(-1)[start:stop]
