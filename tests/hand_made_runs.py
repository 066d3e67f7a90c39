"""Run directories made by hand, and text that tries to break out of a page."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from plain_settings import plain_settings

HOSTILE = (
    "</pre></title><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    "<svg/onload=document.title='pwned'> $x^2$ {{ 7*7 }} &lt; ' \" \u202egnp.exe\u200b\x00\x1b[2J \ud800 end"
)
# The same as a page shows it.
HOSTILE_SHOWN = (
    HOSTILE.replace("\u202e", r"\u202e")
    .replace("\u200b", r"\u200b")
    .replace("\x00\x1b", r"\x00\x1b")
    .replace("\ud800", r"\ud800")
)


def draw_nothing(patch: pytest.MonkeyPatch) -> list[Any]:
    """Let charts be empty pictures, which saves seconds. Returns the list of the charts drawn from now on."""
    drawn: list[Any] = []
    empty = {"svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"></svg>', "png": b""}
    patch.setattr("qarl.report.charts.save", lambda chart, form: drawn.append(chart) or empty[form])
    patch.setattr("qarl.report.page.render_in_parallel", lambda sections: nullcontext())
    return drawn


def make_run(path: Path, metrics: list[dict[str, Any]], steps: int = 4, completion: str = "4") -> Path:
    """Write a run directory with these metrics (a `step` is added) and one rollouts file of three rewards."""
    (path / "rollouts").mkdir(parents=True)
    settings = plain_settings(train={"steps": steps, "run_dir": str(path)}, quant={"group_size": 32})
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    (path / "environment.json").write_text(json.dumps({"packages": {"torch": "2.13"}, "cpu": "a CPU", "gpus": []}))
    lines = [json.dumps({"step": number, **record}) + "\n" for number, record in enumerate(metrics, 1)]
    (path / "metrics.jsonl").write_text("".join(lines))
    rows = [
        {"step": 1, "prompt_id": 0, "sample": i, "prompt": f"2 + 2 = ({i})", "completion": completion, "reward": reward}
        for i, reward in enumerate((0.5, 0.0, 1.0))
    ]
    (path / "rollouts" / "000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def diagnostics(number: int, count: int = 4, **changes: Any) -> dict[str, Any]:
    """Return a record of diagnostics/NNNNNN.json with `count` tokens whose mismatch grows with the step."""
    sampler = [-0.1 - 0.5 * i for i in range(count)]
    ratio = [0.3 * (-1) ** i for i in range(count)]
    tokens = {
        "logp_sampler": sampler,
        "logp_old": [b + 0.01 * number for b in sampler],
        "logp": [b + 0.3 for b in sampler],
        "logp_shadow": [b + 0.1 for b in sampler],
        "log_ratio": ratio,
        "weight": [1.0 + 0.01 * i for i in range(count)],
        "advantage": [1.0, -1.0, 0.0, -0.5] * (count // 4),
        "outside": [True, True, False, False] * (count // 4),
        "phantom": [True, False, False, False] * (count // 4),
    }
    deciles = [{"low": i / 10, "high": (i + 1) / 10, "count": 1, "delta_abs_mean": 0.01 * number} for i in range(10)]
    layers = {f"model.layers.{i}.mlp.{kind}_proj": [i + 1, 10] for i in range(3) for kind in ("up", "down")}
    example = {"text": "so so so", "before": "It is ", "after": " good", "kind": "repetitive", "advantage": -1.0}
    example |= {"start": 2, "stop": 26, "response": 1}
    return {
        "format_version": 1,
        "step": number,
        "metrics": {},
        "token_count": count,
        "deciles": deciles,
        "layers": layers,
        "band": {"level": "token", "high": 1.2, "low": 0.8, "neg_high": None},
        "tokens": tokens,
        "error_examples": [example],
    } | changes


def add_diagnostics(run: Path, *records: dict[str, Any]) -> None:
    (run / "diagnostics").mkdir(exist_ok=True)
    for record in records:
        (run / "diagnostics" / f"{record['step']:06d}.json").write_text(json.dumps(record, allow_nan=False))


def step(number: int, **changes: Any) -> dict[str, Any]:
    """Return metrics of one step as the loop logs them; most of them change from step to step."""
    return {
        "reward/mean": 0.1 * number,
        "reward/std": 0.2,
        "reward/failed": 0.0,
        "response/length_mean": 10.0 + number,
        "response/truncated_frac": 0.5 / number,
        "mismatch/delta_abs_mean": 1e-3 * number,
        "mismatch/delta_abs_max": 0.1 * number,
        "mismatch/k1": -1e-4 * number,
        "policy/entropy": 1.0 / number,
        "policy/grad_norm": 3.0 + number,
        "time/step_s": 5.0 + number,
        "time/rollout_s": 2.0 + number,
        "throughput/rollout_tokens_per_s": 100.0 + number,
        "memory/peak_gib": 4.0 + number,
    } | changes
