"""DeepSpeed's ZeRO, driven by hand on two ranks: the bits of one process that sums in the same order."""

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from ranks import run_ranks
from row_runs import CPU, Case, assert_twins, exchange_of, held, loss_of, reader, rounds, twin

from qarl.policy.policy import Policy
from qarl.training.row_setup import build_rows
from qarl.training.updates import Updates
from qarl.training.zero_updates import build_zero

pytest.importorskip("deepspeed")

COUNT = 2
SMALL = {"zero_optimization": {"reduce_bucket_size": 5000}}  # smaller than some masters and larger than others


def case(model: str, stage: int, sections: dict[str, Any] | None = None, **options: Any) -> Case:
    distributed = {"engine": "deepspeed", "zero_stage": stage, "config": SMALL}
    return Case(model, {**(sections or {}), "distributed": distributed}, **options)


SKIPPED = {"steps": 3, "broken": (1, 0)}
MASTERS = {"quant": {"scheme": "fp8", "learner": "full_precision"}, "optim": {"loss_scale": 64.0, "max_grad_norm": 0.0}}
ROUNDED = {"quant": {"scheme": "nvfp4a16"}, "optim": {"master_dtype": "bfloat16"}}
CASES = {
    "stage 0, a gradient that is not finite": ("llama", 0, SKIPPED),
    "stage 2, one that is not finite, loss scale, nothing clipped, a learner that reads the masters": (
        "qwen3",
        2,
        {**SKIPPED, "sections": MASTERS},
    ),
    "stage 3, a gradient that is not finite, masters in bfloat16": ("qwen2", 3, {**SKIPPED, "sections": ROUNDED}),
    "stage 3, a mixture of experts": ("mixtral", 3, {}),
}


def steps(group: Any, policy: Policy, updates: Updates, case: Case, count: int) -> tuple[list[Any], list[str]]:
    """The norms of some optimizer steps, and the codes after each."""
    norms, digests = [], []
    for step in range(count):
        updates.clear()
        for own in rounds(group.count):
            part = own[group.rank]
            factor = math.nan if [step, group.rank] == list(case.broken or ()) else 1.0
            updates.backward(None if part is None else loss_of(policy, part, factor))
        norm = updates.norm()
        norms.append(norm if math.isfinite(norm) else None)
        updates.step(norm) if math.isfinite(norm) else updates.clear()
        digests.append(policy.current.manifest().digest())
    return norms, digests


def zero(group: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for some in cases:
        case = Case(**some)
        policy, updates = build_zero(case.config, CPU, None, group)
        updates.set_lr(1.0)
        first = policy.current.manifest().digest()
        norms, digests = steps(group, policy, updates, case, case.steps)
        assert all(master.isnan().all() and master.grad is None for master in policy.model.parameters())
        found.append({"norms": norms, "digests": [first, *digests], **held(updates)})
    return found


def whole(group: Any, updates: Updates) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors by group/name, of the pieces of all ranks."""
    pieces, meta = updates.pieces()
    places = [[piece.group, piece.name, list(piece.shape), piece.start, len(piece.values)] for piece in pieces]
    values = group.gather_tensors(torch.cat([piece.values for piece in pieces]))
    found: dict[str, torch.Tensor] = {}
    for own, flat in zip(group.gather(places), values, strict=True):
        parts = flat.split([length for *_, length in own])
        for (kind, name, shape, start, length), part in zip(own, parts, strict=True):
            tensor = found.setdefault(f"{kind}/{name}", torch.full(shape, math.nan))
            tensor.view(-1)[start : start + length] = part
    return found, meta


def moved(group: Any, rows: dict[str, Any], stages: list[dict[str, Any]]) -> dict[str, Any]:
    """A step of sharded masters, its state loaded into each stage and read back, a step of the last, a sharded one."""
    own = Case(**rows)
    config = own.config

    def in_rows() -> tuple[Policy, Updates]:
        policy, updates = build_rows(config, CPU, None, exchange_of(group), group)
        updates.set_lr(1.0)
        return policy, updates

    policy, updates = in_rows()
    norms, digests = steps(group, policy, updates, own, 1)
    tensors, meta = whole(group, updates)
    same = []
    for some in stages:
        policy, updates = build_zero(Case(**some).config, CPU, None, group)
        updates.set_lr(1.0)
        updates.load(reader(tensors), meta, 1)
        there, meta_there = whole(group, updates)
        same.append(there.keys() == tensors.keys() and all(torch.equal(there[key], tensors[key]) for key in tensors))
        same += [meta_there == meta, policy.current.manifest().digest() == digests[0], policy.version == 1]
    for make in (None, in_rows):
        if make is not None:
            tensors, meta = whole(group, updates)
            policy, updates = make()
            updates.load(reader(tensors), meta, 2)
        more, codes = steps(group, policy, updates, own, 1)
        norms, digests = norms + more, digests + codes
    return {"same": same, "norms": norms, "digests": digests}


def everything(group: Any, cases: list[Any], rows: dict[str, Any], stages: list[Any]) -> dict[str, Any]:
    """Run everything in one start, because importing DeepSpeed takes longest."""
    return {"cases": zero(group, cases), "moved": moved(group, rows, stages)}


@pytest.fixture(scope="module")
def cases(tiny_model) -> list[Case]:
    return [case(str(tiny_model(family)), stage, **options) for family, stage, options in CASES.values()]


@pytest.fixture(scope="module")
def arguments(cases, tiny_model) -> dict[str, Any]:
    path = str(tiny_model("qwen3"))
    stages = [asdict(case(path, stage)) for stage in (0, 1, 3, 2)]
    told = [asdict(some) for some in cases]
    return {"cases": told, "rows": asdict(Case(path, steps=3)), "stages": stages}


@pytest.fixture(scope="module")
def found(arguments) -> list[dict[str, Any]]:
    """The results of each rank."""
    return run_ranks(COUNT, f"{__file__}:everything", arguments, limit_s=400)


@pytest.mark.parametrize("name", CASES)
def test_steps_have_the_bits_of_one_process(found, cases, name) -> None:
    number = list(CASES).index(name)
    stage = CASES[name][1]
    # Two ranks' sum is the same in either order, and in stages 2 and 3 one of each round.
    expected, tensors = twin(cases[number], COUNT, by_rank=stage < 2)
    assert_twins([of["cases"][number] for of in found], (expected, tensors))
    if cases[number].broken is not None:
        assert None in expected["norms"] and expected["begun"] == 2


def test_state_moves_between_sharded_masters_and_stages(found, arguments) -> None:
    rows = Case(**arguments["rows"])
    expected, _ = twin(rows, COUNT)
    for rank in found:
        assert all(rank["moved"]["same"])
        assert rank["moved"]["norms"] == expected["norms"] and rank["moved"]["digests"] == expected["digests"][1:]
