"""A mixture of experts on two ranks, in rows and in a DeepSpeed stage: the bits of one process."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
from ranks import run_ranks
from row_runs import CPU, Case, held, loss_of, rounds, sha, trained, twin

from qarl.training.optim import is_hidden_matrix
from qarl.training.zero_updates import build_zero

COUNT = 2
ROWS = {
    "qwen2_moe in rows": ("qwen2_moe", Case("", steps=2)),  # whose gate is one row
    "qwen3_moe in rows, a scale that all experts share": ("qwen3_moe", Case("", {"quant": {"scheme": "nvfp4a16"}})),
}
UNEVEN = Case(
    "", {"optim": {"name": "muon", "lr": 1e-3}, "quant": {"scheme": "w4a16", "group_size": 32, "symmetric": False}}
)
STAGE = {"distributed": {"engine": "deepspeed", "zero_stage": 3}}


def both(group: Any, rows: list[dict[str, Any]], stage: dict[str, Any]) -> dict[str, Any]:
    """In one start: what each case in rows found, and the norms, digests and pieces of a stage."""
    found = [trained(group, Case(**case))[0] for case in rows]
    case = Case(**stage)
    policy, updates = build_zero(case.config, CPU, None, group)
    updates.set_lr(1.0)
    norms, digests = [], [policy.current.manifest().digest()]
    for _ in range(case.steps):
        updates.clear()
        for own in rounds(group.count):
            part = own[group.rank]
            updates.backward(None if part is None else loss_of(policy, part))
        norms.append(updates.norm())
        updates.step(norms[-1])
        digests.append(policy.current.manifest().digest())
    return {"rows": found, "stage": {"norms": norms, "digests": digests, **held(updates)}}


@pytest.fixture(scope="module")
def cases(tiny_model) -> list[Case]:
    pytest.importorskip("deepspeed")
    in_rows = [Case(str(tiny_model(family)), case.sections, case.steps) for family, case in ROWS.values()]
    return [*in_rows, Case(str(tiny_model("mixtral")), STAGE)]


@pytest.fixture(scope="module")
def found(cases) -> list[list[dict[str, Any]]]:
    """Of each rank, what it found in each case."""
    *rows, stage = map(asdict, cases)
    of_ranks = run_ranks(COUNT, f"{__file__}:both", {"rows": rows, "stage": stage}, limit_s=240)
    return [[*of["rows"], of["stage"]] for of in of_ranks]


@pytest.mark.parametrize("number", [0, 1, 2], ids=[*ROWS, "mixtral in stage 3"])
def test_steps_have_the_bits_of_one_process(found, cases, number) -> None:
    expected, tensors = twin(cases[number], COUNT)
    assert len(set(expected["digests"])) == len(expected["digests"])  # every step changed the codes
    covered = dict.fromkeys(tensors, 0)
    for of in found:
        rank = of[number]
        assert rank["norms"] == expected["norms"] and rank["digests"] == expected["digests"]
        assert rank["state"] == expected["state"]
        for what, (start, stop, shape, digest) in rank["pieces"].items():
            assert tuple(shape) == tensors[what].shape, what
            assert digest == sha(tensors[what].reshape(-1)[start:stop]), what
            covered[what] += stop - start
    assert covered == {what: tensor.numel() for what, tensor in tensors.items()}
    experts = [what for what in covered if ".experts.3." in what]
    assert len(experts) == (2 if number != 1 else 1) * 3 * 4  # master, two moments and a count of steps


def uneven(group: Any, case: dict[str, Any]) -> dict[str, Any]:
    found, _, updates = trained(group, Case(**case))
    held = [name for name, rows in updates.shards.items() if ".experts." in name and len(rows)]
    exchange, shapes = updates.exchange, updates.plan.shapes
    hidden = {name: math.prod(shapes[name]) for name, rows in updates.shards.items() if is_hidden_matrix(name, rows)}
    told = {"parts": exchange.parts, "muon": exchange.received["muon"], "blocks": len(updates.plan.blocks)}
    return {**found, **told, "held": held, "hidden": hidden}


def test_three_ranks_whose_cuts_go_through_experts(tiny_model) -> None:
    case = Case(str(tiny_model("mixtral")), UNEVEN.sections, steps=1)
    expected, tensors = twin(case, 3)
    found = run_ranks(3, f"{__file__}:uneven", {"case": asdict(case)}, limit_s=240)
    covered = dict.fromkeys(tensors, 0)
    for rank in found:
        assert rank["norms"] == expected["norms"] and rank["digests"] == expected["digests"]
        for what, (start, stop, _, digest) in rank["pieces"].items():
            assert digest == sha(tensors[what].reshape(-1)[start:stop]), what
            covered[what] += stop - start
        others = 2
        assert rank["blocks"] == 3 + 2 * (4 + 2 + 1 + 2)  # of a layer: attention, norms, router, experts' two stacks
        assert rank["parts"]["gradients"] <= len(rounds(3)) * others * rank["blocks"]
        assert rank["parts"]["codes"] <= 2 * others  # of two versions, each in one message
    assert covered == {what: tensor.numel() for what, tensor in tensors.items()}
    held = [name for rank in found for name in rank["held"]]
    assert {held.count(name) for name in held} == {1, 2}  # some experts are cut, the others are one rank's
    elsewhere = sum(size for name, size in found[0]["hidden"].items() if held.count(name) != 1)
    there_and_back = 2 * 2  # in 16 bits
    assert 0 < sum(rank["muon"] for rank in found) <= there_and_back * elsewhere
