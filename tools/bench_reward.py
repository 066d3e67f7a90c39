#!/usr/bin/env python3
"""Compare training reward over time of TRL's GRPOTrainer and qarl, with the same device, policy, data and batch.

    qarl train my.yaml train.run_dir=runs/alone          # one run at a time, because times are compared
    python tools/bench_reward.py runs/alone --out out.json

TRL (written against 1.16) samples with vLLM in its process, or with transformers on a CPU. Policy, prompts, reward,
batch, learning rate and number of steps are those of the first run. Time starts at the first training step for both:
engine startup, compilation before that step and evaluations do not count. TRL keeps its default loss, clipping and
correction of vLLM's log-probs.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from harness import Record, Report, command_line, count, environment, positive

from qarl.config import Config
from qarl.rewards.builtin import regex
from qarl.storage.runs import read_run


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, out=...)
    parser.add_argument("runs", type=Path, nargs="+", help="finished runs of qarl; the first one configures TRL")
    parser.add_argument("--device-batch", type=count, default=32, help="TRL's per_device_train_batch_size")
    parser.add_argument("--memory-frac", type=positive, default=0.3, help="fraction of the GPU's memory for vLLM")
    return parser.parse_args(arguments)


def trl_curve(config: Config, options: argparse.Namespace, place: Path) -> list[Record]:
    """Train with TRL. Returns per training step its mean reward, and the seconds from the start to its end."""
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl_peer import step_clock, trainer_arguments

    function, *others = config.reward.functions
    assert function.name == "regex" and not others, "evidence runs have this one reward"
    rows, minibatch = config.responses_per_step, config.train.minibatch_size or config.responses_per_step
    updates, batch = rows // minibatch, options.device_batch
    rewards: list[float] = []
    ends: list[float] = []

    def answered(completions: list[Any], prompts: list[Any], **columns: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        scores = regex(texts, [""] * len(texts), **function.options, **columns)
        rewards.append(statistics.fmean(scores))
        return scores

    dataset = load_dataset("json", data_files=str(config.data.source), split="train")
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    arguments = trainer_arguments(place, config.train.steps * updates, minibatch, batch, device, False)
    arguments |= {
        "learning_rate": config.optim.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": config.optim.warmup_steps,
        "weight_decay": config.optim.weight_decay,
        "num_generations": config.rollout.n,
        "steps_per_generation": rows // batch,
        "max_completion_length": config.rollout.max_response_length,
        "seed": config.train.seed,
        "use_vllm": on_gpu,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": options.memory_frac,
        "vllm_max_model_length": config.model.max_length,
    }
    trainer = GRPOTrainer(
        model=str(config.model.path),
        reward_funcs=answered,
        args=GRPOConfig(**arguments),
        train_dataset=dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}),
        callbacks=[step_clock(time.perf_counter, lambda _: ends.append(time.perf_counter()))],
    )
    begin = time.perf_counter()
    trainer.train()
    assert len(rewards) == config.train.steps, f"{len(rewards)} generations for {config.train.steps} steps"
    return [{"reward": r, "seconds": ends[(i + 1) * updates - 1] - begin} for i, r in enumerate(rewards)]


def main() -> None:
    options = parse()
    runs = {path.name: read_run(path) for path in options.runs}
    config = next(iter(runs.values())).config
    report = Report(options.out, environment())
    report.content["config"] = config.model_dump(mode="json")
    for name, run in runs.items():
        seconds = accumulate(row["time/step_s"] for row in run.metrics)
        curve = [{"reward": row["reward/mean"], "seconds": s} for row, s in zip(run.metrics, seconds, strict=True)]
        report.add([{"trainer": "qarl", "run": name, "steps": curve}], name)
    report.add([{"trainer": "TRL", "steps": trl_curve(config, options, options.out.parent / "trl_run")}], "TRL")
    for record in report.content["records"]:
        steps = record["steps"]
        last = statistics.fmean(step["reward"] for step in steps[len(steps) // 2 :])
        name = " ".join(filter(None, (record["trainer"], record.get("run"))))
        print(f"{name}: {len(steps)} steps in {steps[-1]['seconds']:.1f} s, reward of the second half {last:.3f}")


if __name__ == "__main__":
    main()
