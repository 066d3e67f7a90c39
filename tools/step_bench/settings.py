"""A case's configuration of qarl: what the parts ask for, then the user's overrides, then the device's sizes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from model_sizes import Shape
from qarl_formats.registry import grouped_names

from qarl.config import Config
from qarl.config.load import make_config
from qarl.memory.sizes import decide_sizes
from qarl.utils.machine import gpu_bytes


def quant_section(scheme: str, shape: Shape) -> dict[str, Any]:
    return {"scheme": scheme} | ({"group_size": shape.group_size} if scheme in grouped_names() else {})


def learner_sections(scheme: str, shape: Shape, device: str, tokens: int, recompute: str) -> dict[str, Any]:
    """Of a learner alone, on random weights: one optimizer step, in micro-batches of `tokens`."""
    return {
        "model": {"path": "random/model", "device": device},
        "quant": quant_section(scheme, shape),
        "data": {"source": "task:arithmetic"},
        "reward": {"functions": [{"name": "exact"}]},
        "objective": {"name": "grpo"},
        "train": {"steps": 1, "micro_batch_tokens": tokens, "recompute": recompute},
    }


def learner_config(options: argparse.Namespace, shape: Shape, device: torch.device, length: int) -> Config:
    """Of a learner alone, whose responses have `length` tokens."""
    data = learner_sections(options.scheme, shape, device.type, options.tokens, options.recompute)
    data["rollout"] = {"max_response_length": length}
    data["optim"] = {"name": options.optimizer}
    data["train"]["seed"] = options.seed
    return decide_sizes(make_config(data, "bench_step", options.set), device.type, shape.architecture(), gpu_bytes())


def stop_tokens(mean: int | None, vocabulary: int) -> list[int]:
    """Token ids that end a response of a model with random weights after about `mean` tokens; None: none.

    Such a model gives all tokens similar probabilities, so lengths are nearly geometric.
    """
    return [] if mean is None else list(range(5, vocabulary, max(1, mean)))


def step_sections(options: argparse.Namespace, shape: Shape, model: Path, place: Path, engine: str) -> dict[str, Any]:
    """Of a whole run, as its YAML would give it. place: holds prompts and reward, and gets the run."""
    return {
        "model": {
            "path": str(model),
            "device": options.device,
            "max_length": options.prompt_tokens + options.new_tokens,
        },
        "quant": quant_section(options.scheme, shape),
        "rollout": {
            "engine": engine,
            "n": options.responses,
            "max_response_length": options.new_tokens,
            "ignore_eos": True,  # each response has exactly as many, unless stop tokens end it
            "stop_token_ids": stop_tokens(options.mean_tokens, shape.vocabulary),
            "max_num_seqs": options.prompts * options.responses,
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
        "optim": {"name": options.optimizer, "lr": options.lr},
        "train": {
            "steps": options.steps,
            "prompts_per_step": options.prompts,
            "micro_batch_tokens": options.tokens,
            "recompute": options.recompute,
            "seed": options.seed,
            "run_dir": str(place / "run"),
        },
        "checkpoint": {"every": options.steps + 1, "save_final": False},
        "logging": {"console": "plain", "tensorboard": False, "rollouts_every": options.steps + 1},
    }
