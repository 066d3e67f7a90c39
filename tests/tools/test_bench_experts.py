"""Section `experts` of tools/bench_kernels.py without a GPU: qarl's side in the interpreter, and the summary."""

from dataclasses import replace

import pytest
import torch
from bench_kernels import table
from kernel_bench.experts import TOLERANCE, Experts, make_routing, qarl
from kernel_bench.measure import Wrong, check
from model_sizes import SHAPES

CPU = torch.device("cpu")
SIZES = replace(SHAPES["tiny-moe"], experts=4, per_token=2, hidden=64, inner=32)


@pytest.mark.parametrize(("scheme", "kind"), [("bf16", "balanced"), ("w8a8", "skewed")])
def test_qarls_experts_are_those_of_float32(scheme: str, kind: str) -> None:
    experts, routing = Experts(scheme, SIZES, 32, CPU), make_routing(kind, 5, SIZES, CPU)
    x = torch.randn(5, SIZES.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    picked = torch.arange(5)
    expected = experts.expected(x, routing, picked)
    result = qarl(experts)(x, routing)()
    assert check(result, expected, picked, (5, SIZES.hidden), TOLERANCE) < TOLERANCE
    with pytest.raises(Wrong, match="relative error"):
        check(result.flip(0), expected, picked, (5, SIZES.hidden), TOLERANCE)


def test_the_table_has_the_best_peer_the_worst_case_and_what_did_not_run() -> None:
    case = {"model": "m", "routing": "balanced", "m": 8}
    times = {
        "w4a16": {"qarl": 10.0, "vllm_marlin": 15.0},
        "bf16": {"qarl": 20.0, "vllm_triton": 30.0, "torch_grouped": 16.0},
    }
    rows = [
        {"section": f"experts {s}", "who": who, "us": us} | case for s, by in times.items() for who, us in by.items()
    ]
    rows.append({"section": "experts w8a8", "who": "vllm_triton", "skipped": "no kernel", "model": "m"})
    text = table({"environment": None, "records": rows})
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "experts w4a16 1.50 - 1.50 1 M=8 m balanced against vllm_marlin" in lines
    assert "experts bf16 0.80 - 0.80 1 M=8 m balanced against torch_grouped" in lines
    assert "skipped 1x experts w8a8 vllm_triton: no kernel" in lines
