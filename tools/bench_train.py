#!/usr/bin/env python3
"""Run one configuration under several sets of overrides and tabulate what the runs recorded.

    python tools/bench_train.py configs/quickstart.yaml --out benchmarks/results/quickstart.json \
        --common train.steps=20 --case seed0 "train.seed=0" --case seed1 "train.seed=1"

Each case is `qarl train CONFIG COMMON... CASE...` in a process of its own, so that its wall time includes start-up and
its peak memory is its own. Seconds are medians over the steps after the first, which pays for calibration and warm-up.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TIMES = ("step", "rollout", "reward", "learner", "publish")


def run_case(config: str, overrides: list[str], directory: Path) -> dict:
    command = [
        sys.executable,
        "-m",
        "qarl.cli",
        "train",
        config,
        *overrides,
        f"train.run_dir={directory}",
        "logging.console=plain",
    ]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    wall = time.perf_counter() - start
    shown = " ".join(["qarl", "train", config, *map(shlex.quote, overrides)])
    if done.returncode != 0:
        return {"command": shown, "error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {
        "command": shown,
        "wall_s": wall,
        **summary(records),
        "environment": json.loads((directory / "environment.json").read_text()),
    }


def summary(records: list[dict]) -> dict:
    rewards = [r["reward/mean"] for r in records]
    quarter = max(1, len(rewards) // 4)
    timed = records[1:] or records
    median = lambda key: statistics.median(r[key] for r in timed)  # noqa: E731
    return {
        "steps": len(records),
        "reward_first_quarter": statistics.fmean(rewards[:quarter]),
        "reward_last_quarter": statistics.fmean(rewards[-quarter:]),
        "mismatch_delta_abs_mean": statistics.fmean(r["mismatch/delta_abs_mean"] for r in records),
        "mismatch_delta_abs_max": max(r["mismatch/delta_abs_max"] for r in records),
        "memory_peak_gib": max(r["memory/peak_gib"] for r in records),
        **{f"{name}_s": median(f"time/{name}_s") for name in TIMES},
        "rollout_tokens_per_s": median("throughput/rollout_tokens_per_s"),
        "learner_tokens_per_s": median("throughput/learner_tokens_per_s"),
        "reward_curve": rewards,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. case: of (name, overrides of the configuration)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--case", nargs=2, action="append", metavar=("NAME", "OVERRIDES"), required=True)
    parser.add_argument("--common", default="", metavar="OVERRIDES", help="overrides of every case")
    parsed = parser.parse_args(arguments)
    common = shlex.split(parsed.common)
    parsed.case = [(name, [*common, *shlex.split(overrides)]) for name, overrides in parsed.case]
    return parsed


def main() -> None:
    args = parse()
    cases: dict[str, dict] = {}
    environment = None
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name, overrides in args.case:
        with tempfile.TemporaryDirectory() as scratch:
            cases[name] = run_case(args.config, overrides, Path(scratch) / "run")
        print_row(name, cases[name])
        found = cases[name].pop("environment", None)
        if environment is None and found is not None:
            # each case has its own command; the host's name says nothing to a reader
            environment = {k: v for k, v in found.items() if k not in ("command", "host")}
        record = {"command": shlex.join(["python", *sys.argv]), "environment": environment, "cases": cases}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def print_row(name: str, case: dict) -> None:
    if "error" in case:
        print(f"{name:24} FAILED {case['error']}", flush=True)
        return
    print(
        f"{name:24} reward {case['reward_first_quarter']:.3f} -> {case['reward_last_quarter']:.3f}  "
        f"delta mean {case['mismatch_delta_abs_mean']:.2e} max {case['mismatch_delta_abs_max']:.2e}  "
        f"step {case['step_s']:.2f} s (rollout {case['rollout_s']:.2f}, learner {case['learner_s']:.2f}, "
        f"publish {case['publish_s']:.2f})  {case['memory_peak_gib']:.2f} GiB  wall {case['wall_s']:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
