"""Masters sharded over several ranks: the bits of one process that sums the same parts in the same order."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from ranks import run_ranks
from row_runs import Case, assert_twins, offloading, trained, twin

CASES = {
    "w4a16, tied, a gradient that is not finite": ("llama", Case("", steps=3, broken=(1, 0))),
    "w4a16 in groups of 64 with zero points, float16": (
        "qwen3",
        Case("", {"quant": {"group_size": 64, "symmetric": False}, "model": {"dtype": "float16"}}),
    ),
    "bf16, masters in bfloat16": (
        "mistral",
        Case("", {"quant": {"scheme": "bf16"}, "optim": {"master_dtype": "bfloat16"}}),
    ),
    "masters on the host, in bfloat16, one gradient that is not finite": (
        "qwen3",
        Case("", {"optim": {"offload": "all", "master_dtype": "bfloat16"}}, steps=3, broken=(1, 0)),
    ),
    "muon, masters on the host, in bfloat16": (
        "llama",
        Case("", {"optim": {"name": "muon", "lr": 1e-2, "offload": "all", "master_dtype": "bfloat16"}}),
    ),
    "experts, whose gate is one row": ("qwen2_moe", Case("")),
    "a scale that all experts share": ("qwen3_moe", Case("", {"quant": {"scheme": "nvfp4a16"}})),
}


def on_the_device(case: Case) -> Case:
    """The same steps with nothing on the host."""
    return replace(case, sections={**case.sections, "optim": {**case.sections.get("optim", {}), "offload": False}})


def train(group, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        with offloading():
            result, policy, _ = trained(group, Case(**case))
        masters = list(policy.model.parameters())
        result["handles"] = [all(m.isnan().all() for m in masters), sum(m.untyped_storage().nbytes() for m in masters)]
        result["masters"] = len(masters)
        found.append(result)
    return found


@pytest.fixture(scope="module")
def cases(tiny_model) -> list[Case]:
    return [Case(str(tiny_model(family)), case.sections, case.steps, case.broken) for family, case in CASES.values()]


@pytest.fixture(scope="module")
def found(cases) -> list[list[dict[str, Any]]]:
    """The results of each of three ranks, by case."""
    return run_ranks(3, f"{__file__}:train", {"cases": [asdict(case) for case in cases]}, limit_s=400)


@pytest.mark.parametrize("name", CASES)
def test_steps_have_the_bits_of_one_process(found, cases, name) -> None:
    number = list(CASES).index(name)
    expected, tensors = twin(on_the_device(cases[number]), 3)
    ranks = [of[number] for of in found]
    assert_twins(ranks, (expected, tensors))
    assert all(rank["handles"] == [True, 4 * rank["masters"]] for rank in ranks)
    losses = [loss for together in zip(*(rank["losses"] for rank in ranks), strict=True) for loss in together]
    told = [loss for loss in losses if loss is not None]
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(told, expected["losses"], strict=True))
    changes = len(expected["digests"]) - expected["norms"].count(None)  # skipped steps leave the codes as they are
    assert len(set(expected["digests"])) == changes
    if cases[number].broken is not None:
        assert None in expected["norms"] and expected["begun"] == 2
