"""A mixture of experts on three ranks, whose cuts go through experts: the bits of one process, in few messages."""

import math
from dataclasses import asdict
from typing import Any

from ranks import run_ranks
from row_runs import Case, assert_twins, rounds, trained, twin

from qarl.training.optim import is_hidden_matrix

UNEVEN = {"optim": {"name": "muon", "lr": 1e-3}, "quant": {"scheme": "w4a16", "group_size": 32, "symmetric": False}}


def uneven(group: Any, case: dict[str, Any]) -> dict[str, Any]:
    found, _, updates = trained(group, Case(**case))
    held = [name for name, rows in updates.shards.items() if ".experts." in name and len(rows)]
    exchange, shapes = updates.exchange, updates.plan.shapes
    hidden = {name: math.prod(shapes[name]) for name, rows in updates.shards.items() if is_hidden_matrix(name, rows)}
    told = {"parts": exchange.parts, "muon": exchange.received["muon"], "blocks": len(updates.plan.blocks)}
    return {**found, **told, "held": held, "hidden": hidden}


def test_steps_have_the_bits_of_one_process(tiny_model) -> None:
    case = Case(str(tiny_model("mixtral")), UNEVEN, steps=1)
    found = run_ranks(3, f"{__file__}:uneven", {"case": asdict(case)}, limit_s=240)
    assert_twins(found, twin(case, 3))
    others = 2
    for rank in found:
        assert rank["blocks"] == 3 + 2 * (4 + 2 + 1 + 2)  # of a layer: attention, norms, router, experts' two stacks
        assert rank["parts"]["gradients"] <= len(rounds(3)) * others * rank["blocks"]
        assert rank["parts"]["codes"] <= 2 * others  # of two versions, each in one message
    held = [name for rank in found for name in rank["held"]]
    assert {held.count(name) for name in held} == {1, 2}  # some experts are cut, the others are on one rank
    elsewhere = sum(size for name, size in found[0]["hidden"].items() if held.count(name) != 1)
    there_and_back = 2 * 2  # in 16 bits
    assert 0 < sum(rank["muon"] for rank in found) <= there_and_back * elsewhere
