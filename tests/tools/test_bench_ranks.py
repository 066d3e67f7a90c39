"""`tools/bench_ranks.py` on two ranks: of gloo, and of two GPUs where there are."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_sizes import SHAPES
from ranks_bench.summary import table

from qarl.policy.skeleton import skeleton

TOOL = Path(__file__).parents[2] / "tools" / "bench_ranks.py"
GPUS = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")],
)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("device", ["cpu", GPUS])
def test_the_learner_runs_beside_its_peer(device: str, tmp_path: Path) -> None:
    """One layout; float32 gradients beside 16-bit ones and weights."""
    out = tmp_path / "out.json"
    parts = ["learn", *["zero3"] * (importlib.util.find_spec("deepspeed") is not None)]
    sizes = ["--shape", "tiny", "--layers", 1, "--scheme", "w4a16", "--iterations", 1, "--tokens", 64]
    done = run("--device", device, *sizes, "--part", *parts, "--out", out)
    assert done.returncode == 0, done.stderr
    records = json.loads(out.read_text())["records"]
    assert list(dict.fromkeys(record["part"] for record in records)) == parts
    assert all(record["seconds"] == max(record["seconds_by_rank"]) > 0 for record in records)
    found = {(record["part"], record["what"]): record for record in records}
    parameters = sum(p.numel() for p in skeleton(replace(SHAPES["tiny"], layers=1).config()).parameters())
    for (part, what), record in found.items():
        if what == "micro-batch":
            assert record["tokens_per_s"] == 64 / record["seconds"]
            width = {"learn": 4, "zero3": 2}[part]
            assert record["received_bytes_by_kind"]["gradients"] == pytest.approx(width * parameters / 2, rel=0.01)
    assert 0 < found["learn", "update"]["received_bytes_by_kind"]["codes"] < 2 * parameters / 2
    if ("zero3", "update") in found:
        for what in ("micro-batch", "update"):
            assert found["learn", what].keys() <= found["zero3", what].keys()
        # the embedding and the products' weights once: no norm is cut
        weights = parameters - 2 * 64 - 2 * 32 - 64
        assert found["zero3", "micro-batch"]["received_bytes_by_kind"]["weights"] == 2 * weights / 2


@pytest.mark.parametrize(
    ("arguments", "missing", "said"),
    [
        (["--part", "zero3"], "deepspeed", "--part zero3 needs deepspeed: pip install 'qarl[deepspeed]'"),
        (["--part", "zero3", "--hf-head", "trl"], "trl", "--hf-head trl needs trl: pip install 'trl>=1.16'"),
        (["--part", "learn", "--tokens", "1500"], "", "--tokens above 1024 takes multiples of it"),
        (["--nproc", "1"], "", "--nproc takes numbers from 2"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(arguments, missing, said, monkeypatch, capsys) -> None:
    import bench_ranks

    monkeypatch.setattr(bench_ranks, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(SystemExit):
        bench_ranks.parse([*arguments, "--out", "unused"])
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_the_table_sets_each_scheme_beside_the_peer() -> None:
    def row(part: str, what: str, seconds: float, **more: Any) -> dict[str, Any]:
        labels = {"part": part, "scheme": "bf16", "offload": None, "what": what}
        rate = {"tokens": 1024, "tokens_per_s": 1024 / seconds} if what == "micro-batch" else {}
        return (
            labels | rate | {"seconds": seconds, "peak_gib": 2.0, "received_bytes_by_kind": {"gradients": 10**9}} | more
        )

    peer = [
        row("zero3", "micro-batch", 2.0, head="trl"),
        row("zero3", "update", 0.25, head="trl", peak_gib=3.0, received_bytes_by_kind={}),
    ]
    ours = [row("learn", "micro-batch", 1.0), row("learn", "update", 0.5)]
    lines = table([*ours, *peer], "tiny", 2).splitlines()
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "learn bf16 1024 2.00 1000.0 500.0 2.0 1 gradients; an update 1 gradients",
        "zero3 bf16 TRL's head 512 1.00 2000.0 250.0 3.0 1 gradients; an update none",
    ]
