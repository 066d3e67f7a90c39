"""Asynchronous rollouts on two GPUs: exact at every staleness, and equal to the synchronous run at staleness 0."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from run_faults import BY_ENGINE
from tiny_models import tiny_settings

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

SCHEMES = [("qwen3", "w4a16", 32), ("llama", "bf16", None), ("qwen3", "fp8", None), ("qwen3_moe", "w8a8", None)]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def train(
    folder: Path,
    name: str,
    model: Path,
    scheme: str,
    group: int | None,
    rollout: dict[str, Any] | None = None,
    **ahead: Any,
) -> list[dict[str, Any]]:
    """The metrics of a run of five steps in a process of its own; no `ahead`: synchronous. rollout: more of it."""
    own = {"max_response_length": 96, "n": 4, "max_num_seqs": 24, **(rollout or {})}
    data = tiny_settings(
        model,
        model={"path": str(model), "device": "cuda"},
        quant={"scheme": scheme, "group_size": group},
        rollout=own | ({"async": ahead} if ahead else {}),
        train={"steps": 5, "run_dir": str(folder / name)},
    )
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data))
    done = subprocess.run([sys.executable, "-m", "qarl.cli", "train", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(BY_ENGINE)} for row in rows]


@pytest.mark.parametrize(("family", "scheme", "group"), SCHEMES)
def test_two_gpus_give_exact_log_probs_at_any_staleness(tiny_model, tmp_path, family, scheme, group):
    model = tiny_model(family)
    whole = train(tmp_path, "sync", model, scheme, group)
    assert timeless(train(tmp_path, "zero", model, scheme, group, max_staleness=0)) == timeless(whole)
    flight = train(tmp_path, "flight", model, scheme, group, max_staleness=3, in_flight="recompute_kv")
    waits = train(tmp_path, "waits", model, scheme, group, max_staleness=2, in_flight="wait")
    on_host = {"max_staleness": 2, "in_flight": "wait", "kept_versions": "host"}
    assert timeless(train(tmp_path, "again", model, scheme, group, **on_host)) == timeless(waits)
    assert max(row["async/staleness_max"] for row in flight) > 0
    assert all(row["mismatch/delta_abs_max"] == 0.0 for row in [*whole, *flight, *waits])


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_on_its_own_gpu_is_exact_while_weights_change(tiny_model, tmp_path):
    """Two responses at a time, so that weights arrive while some are in progress, under CUDA graphs of decodes."""
    model = tiny_model("qwen3", **SIZES)
    vllm = {"engine": "vllm", "max_num_seqs": 2}
    rows = train(tmp_path, "vllm", model, "w4a16", 32, vllm, max_staleness=1, in_flight="recompute_kv")
    assert len(rows) == 5 and max(row["async/continued_frac"] for row in rows) > 0
    assert max(row["async/staleness_max"] for row in rows) == 1
    assert all(row["mismatch/delta_abs_max"] == row["publish/canary_abs_max"] == 0.0 for row in rows)
    assert all(row["publish/proved_frac"] > 0.99 for row in rows)
