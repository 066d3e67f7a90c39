"""Training steps of TRL's GRPOTrainer, to compare with qarl's: the same model and prompts, with vLLM in its process.

Written for TRL 1.16. As in qarl, an optimizer step accumulates gradients over all responses of a training step.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import Record, records_of_steps
from model_sizes import LR, REWARD, Shape, model_directory, questions

from qarl.training.metrics import peak_memory_gib


def trainer_arguments(place: Path, steps: int, rows: int, batch: int, device: str, checkpointing: bool) -> Record:
    """Return arguments of `trl.GRPOConfig`: float32 master weights, bf16 products on a GPU, AdamW, no KL term.

    steps: Optimizer steps. rows: Responses per step. batch: Responses per forward and backward pass.
    checkpointing: Whether to recompute activations in the backward pass.
    """
    return {
        "output_dir": str(place),
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": rows // batch,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": device == "cuda",
        "use_cpu": device == "cpu",
        "gradient_checkpointing": checkpointing,
        "model_init_kwargs": {"attn_implementation": "sdpa", "dtype": "float32"},
        "save_strategy": "no",
        "report_to": "none",
        "temperature": 1.0,
        "beta": 0.0,
        "logging_steps": 1,
    }


def step_clock(now: Callable[[], float], done: Callable[[float], object]) -> Any:
    """Return a TrainerCallback that calls `done` with the seconds of each training step. now: Returns seconds."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Times a step from before its first micro-batch, which generates the responses of all micro-batches."""

        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            self._begin = now()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            done(now() - self._begin)

    return Clock()


def grpo_arguments(options: argparse.Namespace, place: Path, engine: str) -> Record:
    """Return arguments of `trl.GRPOConfig` with one generation for all prompts and one optimizer step per step."""
    rows = options.prompts * options.responses
    arguments = trainer_arguments(place, options.steps, rows, options.device_batch, options.device, True) | {
        "num_generations": options.responses,
        "max_completion_length": options.new_tokens,
        # No response ends earlier.
        "generation_kwargs": {"ignore_eos": True} if engine == "vllm" else {"min_new_tokens": options.new_tokens},
        "shuffle_dataset": False,
        "seed": 0,
    }
    colocated = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_tensor_parallel_size": 1,
        "vllm_gpu_memory_utilization": options.memory_frac or 0.4,
        "vllm_max_model_length": options.prompt_tokens + options.new_tokens,
    }
    return arguments | (colocated if engine == "vllm" else {})


class Spent:
    """Measures the seconds spent in functions of the trainer since the last `read`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    def within(self, owner: object, method: str, name: str) -> None:
        """Add the seconds of each call of `owner.method` to `name`; wait for the device before and after the call."""
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


def records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """Yield one record per training step, and one with medians over the steps after the first."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model = str(model_directory(options.model_dir, options.shape, shape, device, 0))
    engine = "vllm" if device.type == "cuda" else "transformers"
    spent, lengths = Spent(device), []
    steps: list[dict[str, float]] = []
    reward: dict[str, Any] = {}
    exec(REWARD, reward)  # qarl's run reads the same reward from a file

    def spread(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return reward["spread"](completions, **columns)

    def done(seconds: float) -> None:
        times = {"step_s": seconds} | spent.read()
        steps.append(times | {"learner_s": seconds - times["rollout_s"]})

    begin = time.perf_counter()
    arguments = GRPOConfig(**grpo_arguments(options, options.place / options.part, engine))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=spread,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": questions(options.prompts * options.steps)}),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[step_clock(spent.now, done)],
    )
    # `rollout_s` includes `publish_s`, `generate_s` and the log-probs of the sampled responses.
    spent.within(trainer, "_generate_and_score_completions", "rollout_s")
    if arguments.use_vllm:
        spent.within(trainer.vllm_generation, "generate", "generate_s")
        spent.within(trainer.vllm_generation, "sync_weights", "publish_s")
    else:
        spent.within(trainer, "_generate_single_turn", "generate_s")
    trainer.train()
    whole = {"new_tokens": options.new_tokens, "total_s": time.perf_counter() - begin}
    expected = options.prompts * options.responses * options.steps
    assert len(lengths) == expected, f"{len(lengths)} responses were sampled"
    assert set(lengths) == {options.new_tokens}, "nothing ends a response early"
    yield from records_of_steps(steps, steps, engine=engine, peak_gib=peak_memory_gib(device), **whole)
