#!/usr/bin/env python3
"""The peak memory of a recipe's training steps beside the estimate of `qarl check`.

    python tools/bench_recipes.py --recipe qwen2.5-math-1.5b --out out.json
    python tools/bench_recipes.py --recipe qwen3-8b-base --layers 12 --set optim.offload=all --out out.json
    python tools/bench_recipes.py --recipe qwen2.5-math-7b --nproc 2 --out out.json

Each recipe of configs/recipes runs two steps with random weights of its model's shapes, one problem again and again, a
reward that differs per response, and as many responses as the KV cache holds, all of full length. Everything else is
the recipe's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from harness import Record, Report, count, environment, out_file
from model_sizes import SHAPES
from process_tree import ROOT, with_sources
from step_bench.shapes import REWARD, model_directory

RECIPES = {
    "qwen2.5-math-1.5b": "qwen2.5-1.5b",
    "qwen2.5-math-1.5b-dapo": "qwen2.5-1.5b",
    "qwen2.5-math-7b": "qwen2.5-7b",
    "qwen3-1.7b-sanity": "qwen3-1.7b",
    "qwen3-8b-base": "qwen3-8b",
    "qwen3-30b-a3b-base": "qwen3-30b-a3b",
}
ROW = {"prompt": [{"role": "user", "content": "What is 3 * 4?"}], "reward_model": {"ground_truth": "12"}}
GIB = 2**30


def settings(options: argparse.Namespace, recipe: Path, model: Path, folder: Path) -> list[str]:
    """What differs from the recipe."""
    from qarl.config import load_config

    rows = folder / "rows.jsonl"
    rows.write_text((json.dumps(ROW) + "\n") * 64)
    (reward := folder / "reward.py").write_text(REWARD)
    config = load_config(str(recipe), [*options.set, f"model.path={model}", f"data.source={rows}"])
    at_once = options.nproc * config.kv_cache_tokens // config.max_sequence_length
    prompts = max(options.nproc, -(-at_once // config.rollout.n))
    return [
        *options.set,
        f"model.path={model}",
        f"data.source={rows}",
        f"train.run_dir={folder / 'run'}",
        f"reward={{functions: [{{name: '{reward}:spread'}}]}}",
        "train.steps=2",
        f"train.prompts_per_step={prompts}",
        f"train.minibatch_size={prompts * config.rollout.n}",
        "rollout.ignore_eos=true",
        "evaluation={}",
        "checkpoint={every: 1000, save_final: false}",
        "logging={console: none, tensorboard: false}",
    ]


def measure(options: argparse.Namespace, model: Path, folder: Path) -> Record:
    """Run two steps; return peaks in GiB."""
    from qarl.config import load_config
    from qarl.config.architecture import read_config_json
    from qarl.memory.estimate import PROCESS_BYTES, estimate, peak_bytes

    recipe = ROOT / "configs" / "recipes" / f"{options.recipe}.yaml"
    changed = settings(options, recipe, model, folder)
    ranks = ["--nproc", str(options.nproc)] if options.nproc > 1 else []
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "qarl.cli", "train", *ranks, str(recipe), *changed],
        env=with_sources(os.environ),
        capture_output=True,
        text=True,
        timeout=options.timeout,
    )
    if done.returncode:
        return {"error": f"exit code {done.returncode}: {done.stderr[-2000:]}"}
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    config = load_config(str(folder / "run" / "config.yaml"))
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    architecture = read_config_json(model / "config.json")
    items = estimate(config, architecture, "cuda" if memory else "cpu", ranks=options.nproc, memory=memory)
    last = metrics[-1]
    peak = last.get("memory/peak_gib_max", last["memory/peak_gib"])
    estimated = (peak_bytes(items) - PROCESS_BYTES) / GIB
    return {
        "peak_gib": peak,
        "estimate_gib": estimated,
        "check_gib": peak_bytes(items) / GIB,
        "ratio": estimated / peak,
        "micro_batch_tokens": config.train.micro_batch_tokens,
        "recompute": config.train.recompute,
        "responses": config.train.prompts_per_step * config.rollout.n,
        "step_s": last["time/step_s"],
        "tokens": last.get("response/length_mean"),
        "mismatch": last["mismatch/delta_abs_max"],
        "seconds": time.monotonic() - begin,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--recipe", choices=list(RECIPES), required=True)
    add("--layers", type=count, help="of the model; default those of its shape")
    add("--nproc", type=count, default=1, help="ranks, with a GPU each")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings")
    add("--timeout", type=float, default=500.0, help="seconds of the run")
    add("--shape", choices=list(SHAPES), help="another model, to try the tool")
    add("--models", type=Path, help="folder in which models are kept; default a temporary one")
    add("--out", type=out_file, help="JSON file for the record")
    options = parser.parse_args()
    shape = SHAPES[options.shape or RECIPES[options.recipe]]
    shape = replace(shape, layers=options.layers or shape.layers)
    report = Report(options.out, environment())
    with tempfile.TemporaryDirectory() as name:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = model_directory(options.models or Path(name) / "models", "recipe", shape, device, 0)
        found = measure(options, model, Path(name))
    about = {"recipe": options.recipe, "layers": shape.layers, "ranks": options.nproc, "set": options.set}
    what = f"{options.recipe}, {shape.layers} layers: " + ", ".join(f"{k} {v}" for k, v in found.items())
    report.add([about | found], what)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
