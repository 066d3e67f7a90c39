"""The peer of the step: TRL's GRPOTrainer on the same model and prompts, with vLLM in its process or beside it.

Written against TRL 1.16. Its optimizer step accumulates over all responses of a training step, as qarl's does.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from harness import Record, records_of_steps
from model_sizes import REWARD, VOCABULARY, Shape, model_directory, questions
from step_bench.step_part import LR, stop_tokens

from qarl.training.metrics import peak_memory_gib


def trainer_arguments(place: Path, steps: int, rows: int, batch: int, device: str, checkpointing: bool) -> Record:
    """Arguments of `trl.GRPOConfig` for every run: float32 masters, bf16 products on a GPU, AdamW, no KL term.

    Args:
        place: The trainer's directory.
        steps: Number of optimizer steps.
        rows: Responses per optimizer step.
        batch: Responses that run together; divides `rows`.
        device: "cuda" or "cpu".
        checkpointing: Whether the backward recomputes activations.
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
    """Return a TrainerCallback that calls `done` with the seconds of each training step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """The first micro-batch of a step generates for all of them, so a step begins before it."""

        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            self._begin = now()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            done(now() - self._begin)

    return Clock()


def grpo_arguments(options: argparse.Namespace, place: Path, engine: str) -> Record:
    """Arguments of `trl.GRPOConfig`. A training step generates once, for all prompts, and steps the optimizer once."""
    rows, batch = options.prompts * options.responses, options.device_batch
    assert rows % batch == 0, "bench_step.parse refuses it"
    tokens = stop_tokens(options.mean_tokens, options.vocabulary or VOCABULARY)
    ending = {"ignore_eos": True} | ({"stop_token_ids": tokens} if tokens else {})
    checkpointing = options.recompute != "elementwise"
    arguments = trainer_arguments(place, options.steps, rows, batch, options.device, checkpointing) | {
        "num_generations": options.responses,
        "max_completion_length": options.new_tokens,
        # each response has exactly as many tokens
        "generation_kwargs": ending if engine == "vllm" else {"min_new_tokens": options.new_tokens},
        "shuffle_dataset": False,
        "seed": 0,
    }
    if engine == "vllm" and options.server_gpu is not None:
        return arguments | {"use_vllm": True, "vllm_mode": "server"}
    colocated = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_tensor_parallel_size": 1,
        "vllm_gpu_memory_utilization": options.memory_frac or 0.4,
        "vllm_max_model_length": options.prompt_tokens + options.new_tokens,
    }
    return arguments | (colocated if engine == "vllm" else {})


@contextmanager
def server(options: argparse.Namespace, model: Path) -> Iterator[dict[str, Any]]:
    """A vLLM server on --server-gpu, as `trl vllm-serve` starts it. Yields `GRPOConfig` arguments that name it."""
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    length = options.prompt_tokens + options.new_tokens
    command = build_command(ScriptArguments(model=str(model), host="127.0.0.1", port=port, max_model_len=length))
    own = {"CUDA_VISIBLE_DEVICES": str(options.server_gpu), "VLLM_SERVER_DEV_MODE": "1"}
    process = subprocess.Popen(command, env=os.environ | own, stdout=sys.stderr)
    try:
        yield {"vllm_server_base_url": f"http://127.0.0.1:{port}"}
    finally:
        process.terminate()
        process.wait()


def records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """A record for each training step, and one with medians over those after the first."""
    model = model_directory(options.model_dir, options.shape, shape, device, 0)
    engine = "vllm" if device.type == "cuda" else "transformers"  # its own generate
    place = options.place / options.part
    place.mkdir()
    task = {
        "model": str(model),
        "grpo": grpo_arguments(options, place / "run", engine),
        "prompts": options.prompts * options.steps,
        "new_tokens": options.new_tokens,
        "tail": options.mean_tokens is not None,
    }
    if options.server_gpu is None:
        result = train(task, device)
    else:
        with server(options, model) as named:
            task["grpo"] |= named
            result = train(task, device)
        engine = "vllm server"
    sampled = result["responses"]
    assert sampled == options.prompts * options.responses * options.steps, f"{sampled} responses were sampled"
    yield from records_of(result, engine, options.new_tokens)


def records_of(result: Record, engine: str, new_tokens: int) -> Iterator[Record]:
    """result: of `train`. `rollout_s` holds `publish_s`, `generate_s` and the log-probs at the snapshot."""
    steps = [times | {"learner_s": times["step_s"] - times["rollout_s"]} for times in result["steps"]]
    whole = {"new_tokens": new_tokens, "total_s": result["total_s"], "peak_gib": result["peak_gib"]}
    yield from records_of_steps(steps, steps, engine=engine, **whole)


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


def train(task: Record, device: torch.device) -> Record:
    """steps: seconds of each; total_s: with the start; peak_gib; responses: how many were sampled.

    task: `model`, a directory; `grpo`, arguments of `trl.GRPOConfig`; `prompts`, how many;
    `new_tokens` that each response must have, unless `tail` is true.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    spent, lengths = Spent(device), []
    steps: list[dict[str, float]] = []
    reward: dict[str, Any] = {}
    exec(REWARD, reward)  # the reward that qarl's run reads from a file

    def spread(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return reward["spread"](completions, **columns)

    def done(seconds: float) -> None:
        steps.append({"step_s": seconds} | spent.read())

    begin = time.perf_counter()
    arguments = GRPOConfig(**task["grpo"])
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=spread,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": questions(task["prompts"], 0)}),
        processing_class=AutoTokenizer.from_pretrained(task["model"], padding_side="left"),
        callbacks=[step_clock(spent.now, done)],
    )
    spent.within(trainer, "_generate_and_score_completions", "rollout_s")  # with the log-probs at the snapshot
    if arguments.use_vllm:
        spent.within(trainer.vllm_generation, "generate", "generate_s")
        spent.within(trainer.vllm_generation, "sync_weights", "publish_s")
    else:
        spent.within(trainer, "_generate_single_turn", "generate_s")
    trainer.train()
    total = time.perf_counter() - begin
    assert lengths and (task["tail"] or set(lengths) == {task["new_tokens"]}), "nothing ends a response early"
    return {
        "steps": steps,
        "total_s": total,
        "peak_gib": peak_memory_gib(device),
        "responses": len(lengths),
    }
