"""The parts of `tools/bench_kernels.py` that need no GPU."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON


def test_picked_rows_include_both_ends_and_a_check_finds_wrong_results() -> None:
    from kernel_bench.measure import CHECKED_ROWS, Wrong, check, picked_rows

    assert [picked_rows(m, torch.device("cpu")).tolist() for m in (1, 3)] == [[0], [0, 1, 2]]
    many = picked_rows(16_384, torch.device("cpu")).tolist()
    assert len(set(many)) == CHECKED_ROWS and many[0] == 0 and many[-1] == 16_383
    expected = torch.randn(4, 8)
    rows = torch.tensor([0, 3])
    good = expected.to(torch.bfloat16)
    assert check(good, expected[rows], rows, (4, 8)) < 3e-3
    poisoned = good.clone()
    poisoned[1, 2] = torch.nan  # in a row that is not compared
    for wrong in (good * 1.05, poisoned, good[:3], good.flip(0)):
        with pytest.raises(Wrong):
            check(wrong, expected[rows], rows, (4, 8))


@NEEDS_TRITON
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8", "w4a8", "fp8_block", "dense"])
def test_operands_stand_for_the_numbers_that_were_quantized_and_qarls_kernels_multiply_them(scheme: str) -> None:
    from kernel_bench.measure import check
    from kernel_bench.products import make_problem, qarl

    problem = make_problem(scheme, 192, 256, 5, 64, torch.device("cpu"))
    master = torch.randn(192, 256, generator=torch.Generator().manual_seed(192 + 256)).mul_(0.02)
    tolerance = 0.15 if "w4" in scheme else 0.03
    assert (problem.values - master).norm() / master.norm() < tolerance
    rows = torch.arange(3)
    expected = problem.x[rows].float() @ problem.values.t()
    assert (problem.expected(rows) - expected).norm() / expected.norm() < 0.03
    assert check(qarl(problem)(3)(), problem.expected(rows), rows, (3, 192)) < 1e-2
