"""The peer of the step: TRL's GRPOTrainer with vLLM in its process, on the same model directory and prompts.

Written against TRL 1.16. Its optimizer step accumulates over all responses of a training step, as qarl's does.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from step_bench.measure import Record, peak_gib
from step_bench.shapes import REWARD, Shape, model_directory, questions


def grpo_arguments(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Of `trl.GRPOConfig`. A training step generates once, for all its prompts, and steps the optimizer once."""
    responses = options.prompts * options.responses
    if responses % options.device_batch:
        raise ValueError(f"--device-batch {options.device_batch} does not divide {responses} responses")
    return {
        "output_dir": str(place),
        "max_steps": options.steps,
        "per_device_train_batch_size": options.device_batch,
        "gradient_accumulation_steps": responses // options.device_batch,
        "num_generations": options.responses,
        "max_completion_length": options.new_tokens,
        "generation_kwargs": {"ignore_eos": True},  # each response has exactly as many tokens
        "temperature": 1.0,
        "beta": 0.0,
        "shuffle_dataset": False,
        "learning_rate": options.lr,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": True,
        "gradient_checkpointing": options.recompute != "elementwise",
        "model_init_kwargs": {"attn_implementation": "sdpa", "dtype": "float32"},
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": options.memory_frac,
        "vllm_max_model_length": options.prompt_tokens + options.new_tokens,
        "vllm_enable_sleep_mode": options.trl_sleep,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": options.seed,
    }


class Spent:
    """Seconds in functions of the trainer, since they were last read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    def within(self, owner: object, method: str, name: str) -> None:
        """Count what `owner.method` takes, with the device waited for at both ends."""
        real: Callable[..., Any] = getattr(owner, method)

        def counted(*arguments: Any, **named: Any) -> Any:
            begin = self.now()
            result = real(*arguments, **named)
            self._seconds[name] = self._seconds.get(name, 0.0) + self.now() - begin
            return result

        setattr(owner, method, counted)

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def read(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds


def trl_records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """A record for each training step, and one with medians over those after the first."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model = model_directory(options.model_dir, options.shape, shape, device, options.seed)
    spent, steps, lengths = Spent(device), [], []
    reward: dict[str, Any] = {}
    exec(REWARD, reward)  # the reward that qarl's run reads from a file

    def spread(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return reward["spread"](completions, **columns)

    class Clock(TrainerCallback):
        """The first micro-batch of a step generates for all of them, so a step begins before it."""

        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            self._begin = spent.now()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            steps.append({"step_s": spent.now() - self._begin} | spent.read())

    with tempfile.TemporaryDirectory() as place:
        begin = time.perf_counter()
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=spread,
            args=GRPOConfig(**grpo_arguments(options, Path(place))),
            train_dataset=Dataset.from_dict({"prompt": questions(options.prompts * options.steps, options.seed)}),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            callbacks=[Clock()],
        )
        spent.within(trainer, "_generate_and_score_completions", "rollout_s")  # with the log-probs at the snapshot
        spent.within(trainer.vllm_generation, "generate", "generate_s")
        spent.within(trainer.vllm_generation, "sync_weights", "publish_s")
        trainer.train()
        total = time.perf_counter() - begin
    assert set(lengths) == {options.new_tokens}, "nothing ends a response early"
    yield from records_of(steps, total, peak_gib(device), options.new_tokens)


def records_of(steps: list[dict[str, float]], total: float, peak: float, new_tokens: int) -> Iterator[Record]:
    """steps: seconds of each. `rollout_s` holds `publish_s`, `generate_s` and the log-probs at the snapshot."""
    for number, times in enumerate(steps, 1):
        times["learner_s"] = times["step_s"] - times["rollout_s"]
        yield {"what": "one_step", "step": number, "engine": "vllm", **times}
    timed = steps[1:] or steps
    medians = {name: statistics.median(times[name] for times in timed) for name in timed[0]}
    common = {"steps": len(steps), "new_tokens": new_tokens, "total_s": total, "peak_gib": peak}
    yield {"what": "step", "engine": "vllm", "seconds": medians["step_s"], **common, **medians}
