"""A whole RL step of qarl, as `qarl train` runs it: sampling, one optimizer step, publishing."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import Record, records_of_steps
from model_sizes import REWARD, Shape, model_directory, quant_section, questions

from qarl.config import Config
from qarl.config.yaml_io import dump_yaml
from qarl.storage.runs import METRICS, read_metrics

LR = 1e-6


def step_sections(options: argparse.Namespace, shape: Shape, model: Path, place: Path, engine: str) -> dict[str, Any]:
    """The configuration of a whole run. place: The directory with prompts and reward, which gets the run."""
    ahead = any(setting.startswith("rollout.async") for setting in options.set)
    return {
        "model": {
            "path": str(model),
            "device": options.device,
            "max_length": options.prompt_tokens + options.new_tokens,
        },
        "quant": quant_section(options.scheme, shape.group_size),
        "rollout": {
            "engine": engine,
            "n": options.responses,
            "max_response_length": options.new_tokens,
            "ignore_eos": True,  # each response has exactly as many, unless stop tokens end it
            # Random weights give all tokens similar probabilities, so lengths are nearly geometric.
            "stop_token_ids": list(range(5, shape.vocabulary, options.mean_tokens)) if options.mean_tokens else [],
            # one wave of sequences; with rollout.async qarl's default, because several steps' responses are in progress
            "max_num_seqs": None if ahead else options.prompts * options.responses,
            "vllm": {"memory_frac": options.memory_frac},
        },
        "data": {
            "source": str(place / "prompts.jsonl"),
            "chat_template": False,
            "max_prompt_length": options.prompt_tokens,
            "shuffle": False,
        },
        "reward": {"functions": [{"name": f"{place / 'reward.py'}:spread"}]},
        "objective": {"name": "grpo"},
        "optim": {"lr": LR},
        "train": {
            "steps": options.steps,
            "prompts_per_step": options.prompts,
            "micro_batch_tokens": options.tokens,
            "recompute": "layer",
            "run_dir": str(place / "run"),
        },
        "checkpoint": {"every": options.steps + 1, "save_final": False},
        "logging": {"console": "plain", "tensorboard": False, "rollouts_every": options.steps + 1},
    }


def records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """A record for each training step, and one with medians over those after the first, which compiles."""
    from qarl.config import load_config

    model = model_directory(options.model_dir, options.shape, shape, device, 0)
    engine = options.engine or ("vllm" if device.type == "cuda" else "native")
    place = options.place / options.part
    place.mkdir()
    rows = [json.dumps({"prompt": text}) + "\n" for text in questions(options.prompts * options.steps)]
    (place / "prompts.jsonl").write_text("".join(rows))
    (place / "reward.py").write_text(REWARD)
    (place / "step.yaml").write_text(dump_yaml(step_sections(options, shape, model, place, engine)))
    config = load_config(place / "step.yaml", options.set)
    begin = time.perf_counter()
    code = run(options, place / "step.yaml", config)
    total = time.perf_counter() - begin
    assert code == 0, f"the run ended with {code}"
    steps = read_metrics(place / "run" / METRICS)
    if options.mean_tokens is None:
        lengths = {metrics["response/length_mean"] for metrics in steps}
        assert lengths == {config.rollout.max_response_length}, "nothing ends a response early"
    yield from records_of(steps, config.rollout.max_response_length, engine, total)


def run(options: argparse.Namespace, path: Path, config: Config) -> int:
    """The exit code of `qarl train`, in this process or of the ranks that it starts. config: of path and --set."""
    if options.nproc > 1:
        command = ["-m", "qarl.cli", "train", str(path), *options.set, "--nproc", str(options.nproc)]
        environment = os.environ | {"TMPDIR": str(path.parent)}  # what ranks print before there is a run lies there
        return subprocess.run([sys.executable, *command], env=environment, check=False).returncode
    from qarl.training.loop import train

    return train(config)


def records_of(steps: list[dict[str, Any]], new_tokens: int, engine: str, total: float) -> Iterator[Record]:
    """The metrics of each step, with names as TRL's part has them.

    Args:
        steps: Lines of metrics.jsonl. On several ranks `publish_s` is the first one's, beside `publish_s_min`.
        new_tokens: The most per response.
        engine: That sampled.
        total: Seconds of the run with its start.
    """
    found = []
    for metrics in steps:
        peak = metrics.get("memory/peak_gib_max", metrics["memory/peak_gib"])
        found.append({name.removeprefix("time/"): value for name, value in metrics.items()} | {"peak_gib": peak})
    times = [
        {name: value for name, value in step.items() if re.search("_s(_min|_max|_mean)?$", name)} for step in found
    ]
    whole = {"new_tokens": new_tokens, "total_s": total, "peak_gib": max(step["peak_gib"] for step in found)}
    yield from records_of_steps(found, times, engine=engine, **whole)
