"""Run directories made by hand, and text that wants to break out of a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

HOSTILE = (
    "</pre></title><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    "<svg/onload=document.title='pwned'> $x^2$ {{ 7*7 }} &lt; ' \" \u202egnp.exe\u200b\x00\x1b[2J \ud800 end"
)
# What a reader sees of it.
HOSTILE_SHOWN = (
    "</pre></title><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    "<svg/onload=document.title='pwned'> $x^2$ {{ 7*7 }} &lt; ' \" \\u202egnp.exe\\u200b\\x00\\x1b[2J \\ud800 end"
)


def configuration(path: Path, steps: int = 4) -> dict[str, Any]:
    return {
        "model": {"path": "some/model"},
        "quant": {"group_size": 32},
        "data": {"source": "task:arithmetic"},
        "reward": {"functions": [{"name": "exact"}]},
        "train": {"steps": steps, "run_dir": str(path)},
    }


def make_run(path: Path, metrics: list[dict[str, Any]], steps: int = 4, completion: str = "4") -> Path:
    """A run directory with these metrics (a `step` is added) and one rollouts file of three rewards."""
    (path / "rollouts").mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(configuration(path, steps)))
    (path / "environment.json").write_text(json.dumps({"packages": {"torch": "2.13"}, "cpu": "a CPU", "gpus": []}))
    lines = [json.dumps({"step": number, **record}) + "\n" for number, record in enumerate(metrics, 1)]
    (path / "metrics.jsonl").write_text("".join(lines))
    rows = [
        {"step": 1, "prompt_id": 0, "sample": i, "prompt": f"2 + 2 = ({i})", "completion": completion, "reward": reward}
        for i, reward in enumerate((0.5, 0.0, 1.0))
    ]
    (path / "rollouts" / "000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def step(number: int, **changes: Any) -> dict[str, Any]:
    """Metrics of one step as the loop logs them, all of them changing from step to step."""
    return {
        "reward/mean": 0.1 * number, "reward/std": 0.2, "reward/failed": 0.0, "response/length_mean": 10.0 + number,
        "response/truncated_frac": 0.5 / number, "mismatch/delta_abs_mean": 1e-3 * number,
        "mismatch/delta_abs_max": 0.1 * number, "mismatch/k1": -1e-4 * number, "policy/entropy": 1.0 / number,
        "policy/grad_norm": 3.0 + number, "time/step_s": 5.0 + number, "time/rollout_s": 2.0 + number,
        "throughput/rollout_tokens_per_s": 100.0 + number, "memory/peak_gib": 4.0 + number,
    } | changes  # fmt: skip
