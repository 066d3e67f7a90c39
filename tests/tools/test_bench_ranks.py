"""`tools/bench_ranks.py` on two ranks: of gloo, and of two GPUs where there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOL = Path(__file__).parents[2] / "tools" / "bench_ranks.py"
GPUS = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")],
)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("device", ["cpu", GPUS])
def test_every_part_runs_and_results_are_exact(device: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--shape", "tiny", "--layers", 1, "--scheme", "w4a16", "--iterations", 1, "--products", 1]
    done = run("--device", device, *sizes, "--out", out)
    assert done.returncode == 0, done.stderr
    records = json.loads(out.read_text())["records"]
    assert {record["part"] for record in records} == {"check", "sum", "overlap", "gather"}
    assert [record["wrong_tensors"] for record in records if record["part"] == "check"] == [0] * 5
    assert all(record["seconds"] == max(record["seconds_by_rank"]) > 0 for record in records if "seconds" in record)
    plain, codes = (record["received_bytes"] for record in records if record["part"] == "gather")
    assert 0 < codes < plain
