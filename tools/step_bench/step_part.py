"""A whole RL step of qarl, as `qarl train` runs it: sampling, one optimizer step, publishing."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qarl.config.yaml_io import dump_yaml
from qarl.storage.runs import METRICS, read_metrics
from step_bench.measure import Record
from step_bench.settings import step_sections
from step_bench.shapes import REWARD, Shape, model_directory, write_questions

PHASES = ("step", "rollout", "reward", "learner", "diagnostics", "publish")


def step_records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """A record for each training step, and one with medians over those after the first, which compiles."""
    from qarl.config import load_config
    from qarl.training.loop import train

    model = model_directory(options.model_dir, options.shape, shape, device, options.seed)
    engine = options.engine or ("vllm" if device.type == "cuda" else "native")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_questions(place / "prompts.jsonl", options.prompts * options.steps, options.seed)
        (place / "reward.py").write_text(REWARD)
        (place / "step.yaml").write_text(dump_yaml(step_sections(options, shape, model, place, engine)))
        config = load_config(place / "step.yaml", options.set)
        begin = time.perf_counter()
        code = train(config)
        total = time.perf_counter() - begin
        assert code == 0, f"the run ended with {code}"
        yield from records_of(read_metrics(place / "run" / METRICS), config.rollout.max_response_length, engine, total)


def records_of(steps: list[dict[str, Any]], new_tokens: int, engine: str, total: float) -> Iterator[Record]:
    """steps: lines of metrics.jsonl. total: seconds of the run with its start."""
    for metrics in steps:
        assert metrics["response/length_mean"] == new_tokens, "nothing ends a response early"
        times = {f"{phase}_s": metrics[f"time/{phase}_s"] for phase in PHASES if f"time/{phase}_s" in metrics}
        rates = {f"{side}_tokens_per_s": metrics[f"throughput/{side}_tokens_per_s"] for side in ("rollout", "learner")}
        memory = {"peak_gib": metrics["memory/peak_gib"]}
        idle = {"idle_responses": metrics["policy/zero_advantage_frac"]}
        yield {"what": "one_step", "step": metrics["step"], "engine": engine, **times, **rates, **memory, **idle}
    timed = steps[1:] or steps
    medians = {
        f"{phase}_s": statistics.median(metrics[f"time/{phase}_s"] for metrics in timed)
        for phase in PHASES
        if f"time/{phase}_s" in timed[0]
    }
    yield {
        "what": "step",
        "engine": engine,
        "seconds": medians["step_s"],
        "steps": len(steps),
        "new_tokens": new_tokens,
        "total_s": total,
        "peak_gib": max(metrics["memory/peak_gib"] for metrics in steps),
        **medians,
    }
