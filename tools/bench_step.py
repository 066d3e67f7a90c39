#!/usr/bin/env python3
"""Measure RL training steps, as `qarl train` runs them, against TRL's, on models of known shapes.

    python tools/bench_step.py --part step trl --shape qwen3-1.7b --scheme w4a16 --out out.json
    python tools/bench_step.py --shape qwen3-8b --scheme w4a16 --nproc 2 --out out.json
    python tools/bench_step.py --table out.json...

Each case (part, shape and scheme) runs in its own process on a model with random weights, and writes its output to a
log next to the result. Parts:
  step       training steps with exactly --new-tokens per response, one optimizer step each
  trl        the same with TRL 1.16's GRPOTrainer, with vLLM in its process
Times are medians without the first step, which compiles. The result is written after every case.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import MODELS, Record, aligned, command_line, count, failures, heads, positive, records_of_steps, run_cases

# isort: split
import torch
from model_sizes import LR, REWARD, SHAPES, Shape, model_directory, quant_section, questions, shape_of
from qarl_formats.registry import scheme_names

from qarl.config import Config, load_config
from qarl.config.yaml_io import dump_yaml
from qarl.policy.device import pick_device
from qarl.storage.runs import METRICS, read_metrics
from qarl.training.loop import train
from qarl.utils.machine import keep_freed_memory

PARTS = ("step", "trl")
# Two rows are compared if these are equal: the model, the work, and the number of ranks.
CASE = ("shape", "layers", "vocabulary", "prompts", "responses", "new_tokens", "ranks")
PHASES = ("step", "rollout", "generate", "learner", "publish")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    sizes = {"layers": None, "vocabulary": None, "model_dir": MODELS}
    files = {"timeout": 1800.0, "out": None, "table": None, "case": None}
    parser = command_line(__doc__, device="auto", set=[], **sizes, **files)
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, default=["step"], help="default %(default)s")
    add("--shape", nargs="+", choices=list(SHAPES), default=["qwen3-1.7b"], help="model shapes")
    add("--scheme", nargs="+", choices=scheme_names(), default=["bf16", "w4a16"], metavar="SCHEME")
    add("--tokens", type=count, default=16_384, help="tokens per micro-batch")
    add("--steps", type=count, default=3, help="training steps; medians leave out the first")
    add("--prompts", type=count, default=32, help="prompts per step")
    add("--responses", type=count, default=8, help="responses per prompt")
    add("--new-tokens", type=count, default=1024, help="tokens per response")
    tail = "end responses at random with this mean length, for a long tail of lengths; --new-tokens is the maximum"
    add("--mean-tokens", type=count, help=tail)
    add("--prompt-tokens", type=count, default=512, help="maximum tokens per prompt")
    frac = "fraction of the GPU's memory for vLLM; default 0.4, or with rollout.async qarl's own default"
    add("--memory-frac", type=positive, help=frac)
    add("--nproc", type=count, default=1, help="part step: number of ranks, one per GPU")
    add("--engine", choices=("vllm", "native"), help="qarl's rollout engine; default: vllm on a GPU, else native")
    add("--device-batch", type=count, default=8, help="TRL's per_device_train_batch_size")
    parsed = parser.parse_args(arguments)
    if parsed.table is None and parsed.out is None and parsed.case is None:
        parser.error("--out is needed, or --table")
    responses = parsed.prompts * parsed.responses
    if "trl" in parsed.part and responses % parsed.device_batch:
        parser.error(f"--device-batch {parsed.device_batch} does not divide {responses} responses")
    return parsed


def cases(options: argparse.Namespace) -> Iterator[Record]:
    """Yield part and shape, and the scheme if the part has one, in the order of the command line."""
    for part, shape in itertools.product(options.part, options.shape):
        schemes = [{"scheme": scheme} for scheme in options.scheme] if part == "step" else [{}]
        yield from ({"part": part, "shape": shape} | scheme for scheme in schemes)


def run_part(options: argparse.Namespace, case: Record, place: Path) -> Iterator[Record]:
    """Measure a case, in its own process. place: Directory for its files; logs in it are shown if the case fails."""
    options = argparse.Namespace(**(vars(options) | case))
    options.place = place
    device = pick_device(options.device)
    options.device = device.type
    if device.type == "cpu":
        keep_freed_memory()
    shape = shape_of(options.shape, options.layers, options.vocabulary)
    labels = case | {"layers": shape.layers, "vocabulary": shape.vocabulary}
    labels |= {"prompts": options.prompts, "responses": options.responses, "ranks": options.nproc}
    if options.set and options.part == "step":
        labels["set"] = options.set
    records = step_records
    if options.part == "trl":
        from trl_peer import records
    for record in records(options, shape, device):
        yield labels | record


def step_sections(options: argparse.Namespace, shape: Shape, model: Path, place: Path, engine: str) -> dict[str, Any]:
    """Return the configuration of a run. place: Directory with prompts and reward, and for the run."""
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
            "ignore_eos": True,  # so that each response has all tokens, unless stop tokens end it
            # Random weights give all tokens similar probabilities, so lengths are nearly geometric.
            "stop_token_ids": list(range(5, shape.vocabulary, options.mean_tokens)) if options.mean_tokens else [],
            # All sequences at once; with rollout.async qarl's default, because responses of several steps are sampled.
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


def step_records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """Yield a record per training step, and one with medians over all but the first, which compiles."""
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
    """Run `qarl train` in this process or in --nproc ranks, and return its exit code. config: Of path and --set."""
    if options.nproc > 1:
        command = ["-m", "qarl.cli", "train", str(path), *options.set, "--nproc", str(options.nproc)]
        environment = os.environ | {"TMPDIR": str(path.parent)}  # for the output of ranks before the run is created
        return subprocess.run([sys.executable, *command], env=environment, check=False).returncode
    return train(config)


def records_of(steps: list[dict[str, Any]], new_tokens: int, engine: str, total: float) -> Iterator[Record]:
    """Yield the metrics of each step (lines of metrics.jsonl) under the names that part trl uses.

    On several ranks `publish_s` is the first rank's, next to `publish_s_min`, `_mean` and `_max`. total: Seconds of the
    run.
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


def table(reports: Sequence[Record]) -> str:
    """Return the summary as text. TRL's rows may be in another report than qarl's."""
    rows = [row for report in reports for row in report["records"]]
    timed = [row for row in rows if row.get("what") == "step"]
    peers = {tuple(map(row.get, CASE)): row["seconds"] for row in timed if row["part"] == "trl"}
    lines = [["seconds", *PHASES, "GiB", "trl over it", ""]]
    for row in timed:
        numbers = [row.get(f"{name}_s") for name in PHASES] + [row.get("peak_gib")]
        peer = peers.get(tuple(map(row.get, CASE))) if row["part"] == "step" else None
        numbers.append(None if peer is None else peer / row["seconds"])
        cells = ["" if number is None else f"{number:.2f}" for number in numbers]
        lines.append([_name(row), *cells, " ".join(row.get("set", []))])
    blocks = [heads(reports), aligned(lines), failures(rows)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _name(row: Record) -> str:
    names = [row["shape"], f"{row['layers']} layers", row.get("scheme", "trl"), row["engine"]]
    return " ".join([*names, f"{row['prompts']} x {row['responses']} x {row['new_tokens']}", f"{row['ranks']} ranks"])


def main() -> int:
    options = parse()
    if options.table is not None:
        print(table([json.loads(path.read_text()) for path in options.table]))
        return 0
    report = run_cases(options, cases(options), run_part)
    print(table([report.content]))
    return int(bool(failures(report.content["records"])))


if __name__ == "__main__":
    sys.exit(main())
