"""The parts of `tools/bench_kernels.py` that need no GPU."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_harness import NEEDS_TRITON

TOOLS = Path(__file__).parents[2] / "tools"


class FakeStopwatch:
    """Runs a call and says that it took a fixed time."""

    device = torch.device("cpu")

    def microseconds(self, call: Callable[[], object], reps: int) -> float:
        call()
        return 10.0


def product_row(section: str, who: str, us: float, m: int = 16, n: int = 64) -> dict[str, Any]:
    return {"section": section, "who": who, "n": n, "k": 32, "m": m, "us": us}


def test_the_table_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_kernels
    from bench_kernels import failures

    rows = [
        product_row("fp8", "qarl", 10.0, m=1),
        product_row("fp8", "cutlass", 20.0, m=1),
        product_row("fp8", "qarl", 10.0, m=8),
        product_row("fp8", "cutlass", 5.0, m=8),  # the best peer of three
        product_row("fp8", "scaled_mm", 6.0, m=8),
        product_row("fp8", "cublas_bf16", 30.0, m=8),
        product_row("fp8", "qarl", 10.0, m=256, n=128),
        product_row("fp8", "scaled_mm", 11.0, m=256, n=128),
        {"section": "w4a16", "who": "machete", "kind": "gemm", "n": 64, "k": 32, "m": None, "skipped": "Absent: none"},
    ]
    environment = {"gpus": ["H1"], "packages": {"torch": "2"}, "git_revision": "abc"}
    report = {"environment": environment, "records": rows}
    (tmp_path / "report.json").write_text(json.dumps(report))
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--table", str(tmp_path / "report.json")])
    bench_kernels.main()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "H1, torch 2, revision abc" in lines
    assert "fp8 1.00 1.10 0.50 3 M=8 64x32 against cutlass" in lines
    assert "skipped 1x w4a16 machete: Absent: none" in lines
    wrong = {"who": "qarl", "skipped": "Wrong: wrong: relative error 3.0e-01"}
    assert failures([*rows, wrong]) == [wrong]
    for arguments in (["--schemes", "int3"], ["--models", "gpt-2"], ["--m", "0"], ["--reps", "0"]):
        with pytest.raises(SystemExit):
            bench_kernels.parse(arguments)


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


@NEEDS_TRITON
@pytest.mark.parametrize("scheme", ["w8a8", "dense"])
def test_rows_of_a_scheme_beside_peers(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_bench import products
    from model_sizes import Layer

    def wrong(problem: products.Problem) -> products.Maker:
        return lambda m: lambda: problem.expected(torch.arange(m)) * 1.1

    def absent(problem: products.Problem) -> products.Maker:
        raise RuntimeError("not here")

    own = products.peers
    monkeypatch.setattr(products, "peers", lambda scheme: own("dense") | {"bad": wrong, "absent": absent})
    section = products.product_rows(FakeStopwatch(), 3, 64, Layer("tiny", "qkv", 192, 256), scheme, [1, 33])
    by_who = {(row["who"], row.get("m")): row for row in section}
    assert by_who["qarl", 33]["us"] == 10.0 and by_who["qarl", 33]["relative_error"] < 5e-3
    assert by_who["qarl", 1]["tflops"] == pytest.approx(2 * 192 * 256 / 10e6)
    assert by_who["bad", 1]["skipped"].startswith("Wrong: wrong: relative error")
    assert by_who["cublas_bf16", 1]["us"] == 10.0 and by_who["cublas_bf16", 1]["relative_error"] < 5e-3
    assert by_who["absent", None]["skipped"] == "RuntimeError: not here"
