"""Codes gathered from rows of several ranks: the snapshot of one process to the bit, and its errors on every rank."""

import codes_cases
import pytest
from ranks import run_ranks


@pytest.mark.parametrize("count", [0, 3])
def test_every_rank_has_the_snapshot_of_one_process(count: int) -> None:
    done = run_ranks(count, f"{codes_cases.__file__}:digests") if count else [codes_cases.digests(None)]
    for cases in zip(*done, strict=True):
        label, _, size = cases[0]
        assert sum(received for _, received, _ in cases) == size * (len(done) - 1), label
    assert {label for label, _, _ in done[0]} == set(codes_cases.SCHEMES)


@pytest.mark.parametrize("count", [0, 3])
def test_all_ranks_say_the_same_of_masters_that_are_not_finite(count: int) -> None:
    said = run_ranks(count, f"{codes_cases.__file__}:faults") if count else [codes_cases.faults(None)]
    assert all(one == said[0] for one in said)
    assert len(said[0]) == 8 and all(line.startswith("quantize version 5: model.") for line in said[0])
    assert "k_proj.weight: 256 of 4352 values are NaN or infinite and cannot be quantized" in said[0][1]
    assert "experts.1.up_proj.weight: 128 of 6144 values are NaN or infinite" in said[0][2]
    assert "norm.weight: 1 of 1 values are NaN or infinite in torch.bfloat16" in said[0][3]
    assert "o_proj.weight: group_size 128" in said[0][-1]
