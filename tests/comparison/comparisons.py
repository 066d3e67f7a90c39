"""Made-up run records and comparisons, for tests that train nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from qarl.config import Config
from qarl.storage.runs import RunRecord

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
}


def settings_of(model: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "model": {"path": str(model)},
        "quant": {"group_size": 32},
        "rollout": {"max_response_length": 8},
        "data": {"source": "task:arithmetic", "max_prompt_length": 64},
        "reward": {"functions": [{"name": "exact"}]},
        "train": {"steps": 4, "run_dir": "runs/made-up"},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    return data


def write_model(directory: Path, **changes: Any) -> Path:
    """A model directory that holds a config.json alone: enough for every check, and for no training."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL | changes))
    return directory


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    path = folder / "small.yaml"
    data = settings_of(write_model(folder / "model"), **sections)
    data["train"].pop("run_dir")
    path.write_text(yaml.safe_dump(data))
    return path


def step_record(step: int, **values: float | None) -> dict[str, Any]:
    """A metrics record of plausible numbers; `values` replace them, `__` standing for the slash."""
    record = {
        "step": step,
        "reward/mean": 0.1 * step,
        "mismatch/delta_abs_mean": 0.01,
        "mismatch/delta_abs_max": 0.1 * step,
        "memory/peak_gib": 1.0 + step,
        "time/step_s": 10.0 if step == 1 else float(step),
        "time/rollout_s": 1.0,
        "time/learner_s": 2.0,
        "time/publish_s": 0.1,
        "throughput/rollout_tokens_per_s": 100.0,
        "throughput/learner_tokens_per_s": 200.0,
    }
    return record | {name.replace("__", "/"): value for name, value in values.items()}


def record_of(
    config: Config, path: Path, steps: int = 4, evaluations: list[dict[str, Any]] | None = None, **values: float | None
) -> RunRecord:
    metrics = [step_record(step, **values) for step in range(1, steps + 1)]
    state = "finished" if steps >= config.train.steps else "stopped" if steps else "empty"
    environment = {"packages": {"torch": "2.13"}, "cpu": "a cpu", "host": path.name, "command": [], "seed": 0}
    return RunRecord(path, config, environment, metrics, evaluations or [], state, steps)


def evaluation(step: int, mean: float) -> dict[str, Any]:
    avg = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
    return {"step": step, "tasks": [{"name": "sums", "avg": avg}], "overall": {"avg": avg}}
