"""Made-up run records, for tests of comparisons that do not train."""

from pathlib import Path
from typing import Any

import yaml
from plain_settings import plain_settings, write_model

from qarl.config import Config
from qarl.storage.runs import RunRecord


def settings_of(model: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        **{"model": {"path": str(model)}, "quant": {"group_size": 32}, "rollout": {"max_response_length": 8}},
        **{"data": {"max_prompt_length": 64}, "train": {"run_dir": "runs/made-up"}},
    }
    return plain_settings(**{name: own.get(name, {}) | sections.get(name, {}) for name in {**own, **sections}})


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    path = folder / "small.yaml"
    data = settings_of(write_model(folder / "model"), **sections)
    data["train"].pop("run_dir")
    path.write_text(yaml.safe_dump(data))
    return path


def step_record(step: int, **values: float | None) -> dict[str, Any]:
    """Return a metrics record of plausible numbers. values: Replacements, with `__` for the slash in metric names."""
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
