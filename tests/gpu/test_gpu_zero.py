"""DeepSpeed's ZeRO on two GPUs over NCCL: whole runs, the codes of masters in rows."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import PATHS
from process_tree import tails
from tiny_runs import settings, write_config
from traced import run_traced

GPUS = torch.cuda.device_count()
LIMIT_S = 110  # of a run
pytestmark = [
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices; torch sees {GPUS}"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


def run(config: Path, folder: Path, *overrides: str) -> tuple[list[str], list[float]]:
    """(codes of each checkpoint, norms of each step's gradients) of a run on two ranks."""
    out = folder / "run"
    command = [sys.executable, "-m", "qarl.cli", "train", str(config), "--nproc", "2", f"train.run_dir={out}"]
    path = os.pathsep.join(PATHS + sys.path)
    folder.mkdir()  # also for what ranks print before there is a run
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    try:
        done = run_traced([*command, "distributed.timeout_s=60", *overrides], environment, LIMIT_S)
    except TimeoutError as error:
        pytest.fail(f"{error}\n{tails(folder)}")
    assert done.returncode == 0, done.stdout + done.stderr + tails(folder)
    states: list[dict[str, Any]] = [
        json.loads((out / "checkpoints" / step / "state.json").read_text()) for step in ("000001", "000002")
    ]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [state["snapshot_sha256"] for state in states], [line["policy/grad_norm"] for line in metrics]


@pytest.fixture(scope="module")
def config(tiny_model, tmp_path_factory) -> Path:
    sections: dict[str, Any] = {
        "model": {"device": "cuda"},
        "train": {"steps": 2, "prompts_per_step": 4, "minibatch_size": 8, "micro_batch_tokens": 128},
        "checkpoint": {"every": 1, "keep_last": 2},
    }
    return write_config(tmp_path_factory.mktemp("zero") / "c.yaml", settings(tiny_model("qwen3"), **sections))


@pytest.fixture(scope="module")
def rows(config, tmp_path_factory) -> tuple[list[str], list[float]]:
    return run(config, tmp_path_factory.mktemp("zero") / "rows")


@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_a_stage_has_the_codes_of_rows(config, rows, tmp_path, stage: int) -> None:
    codes, norms = run(config, tmp_path / "zero", "distributed.engine=deepspeed", f"distributed.zero_stage={stage}")
    if stage >= 2:  # two ranks' sum is the same in either order
        assert norms == rows[1]
        assert codes == rows[0]
    else:  # which add a rank's micro-batches up first
        assert norms == pytest.approx(rows[1], rel=1e-2)
