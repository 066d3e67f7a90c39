"""DeepSpeed's ZeRO on two GPUs over NCCL: whole runs, the codes of masters in rows."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tree import run_traced, tails
from ranks import PATHS, ROOT
from tiny_runs import settings, write_config

GPUS = torch.cuda.device_count()
LIMIT_S = 110  # of a run; five of them fit in a test's time
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices; torch sees {GPUS}"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


def run(config: Path, folder: Path, *overrides: str) -> tuple[list[str], list[float]]:
    """(codes of each checkpoint, norms of each step's gradients) of a run on two ranks."""
    command = [sys.executable, "-m", "qarl.cli", "train", str(config), "--nproc", "2", f"train.run_dir={folder}"]
    path = os.pathsep.join([str(ROOT / part) for part in PATHS] + sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    try:
        done = run_traced([*command, "distributed.timeout_s=60", *overrides], environment, LIMIT_S)
    except TimeoutError as error:
        pytest.fail(f"{error}\n{tails(folder)}")
    assert done.returncode == 0, done.stdout + done.stderr + tails(folder)
    states: list[dict[str, Any]] = [
        json.loads((folder / "checkpoints" / step / "state.json").read_text()) for step in ("000001", "000002")
    ]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [state["snapshot_sha256"] for state in states], [line["policy/grad_norm"] for line in metrics]


def test_stages_have_the_codes_of_rows(tiny_model, tmp_path) -> None:
    sections: dict[str, Any] = {
        "model": {"device": "cuda"},
        "train": {"steps": 2, "prompts_per_step": 4, "minibatch_size": 8, "micro_batch_tokens": 128},
        "checkpoint": {"every": 1, "keep_last": 2},
    }
    config = write_config(tmp_path / "c.yaml", settings(tiny_model("qwen3"), **sections))
    codes, norms = run(config, tmp_path / "rows")
    for stage in (2, 3):  # two ranks' sum is the same in either order
        options = ("distributed.engine=deepspeed", f"distributed.zero_stage={stage}")
        assert run(config, tmp_path / f"zero{stage}", *options) == (codes, norms)
    for stage in (0, 1):  # which add a rank's micro-batches up first
        options = ("distributed.engine=deepspeed", f"distributed.zero_stage={stage}")
        _, found = run(config, tmp_path / f"zero{stage}", *options)
        assert found == pytest.approx(norms, rel=1e-2)
