"""What one start of vLLM is asked for, and the configuration that says so."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Record

from qarl.config import Config, QuantConfig

KERNELS = ("vllm", "invariant", "exact")
INVARIANT = "VLLM_BATCH_INVARIANT"


@dataclass(frozen=True)
class Case:
    """One scheme on one set of kernels, and where.

    kernels: vllm, exact (`rollout.numerics`), or invariant (vLLM's own that do not depend on the batch). place:
    directory for the sampler's log and checkpoint.
    """

    scheme: str
    kernels: str
    device: torch.device
    place: Path

    def labels(self) -> Record:
        return {"scheme": self.scheme, "kernels": self.kernels}


def engine_config(case: Case, quant: QuantConfig, options: argparse.Namespace, publish: str) -> Config:
    """The configuration of a run that samples like this. publish: the mode in which vLLM starts."""
    vllm = {"memory_frac": options.memory_frac, "publish": publish, "max_restarts": 0}
    on_gpu, sequences = case.device.type == "cuda", max(options.batch)
    rollout = {
        "engine": "vllm",
        "numerics": "exact" if case.kernels == "exact" else "fast",
        "max_response_length": options.new_tokens,
        "max_num_seqs": sequences,
        "max_batched_tokens": max(8192 if on_gpu else 512, sequences),
        "ignore_eos": True,
        "vllm": vllm | ({} if on_gpu else {"enforce_eager": True}),
    }
    return Config.model_validate(
        {
            "model": {"path": "random/model", "device": case.device.type},
            "quant": quant.model_dump(),
            "rollout": rollout,
            "data": {"source": "task:arithmetic", "max_prompt_length": options.prompt_tokens},
            "reward": {"functions": [{"name": "exact"}]},
            "train": {"steps": 1, "run_dir": str(case.place), "seed": options.seed, "threads": options.threads},
        }
    )


@contextmanager
def environment(case: Case) -> Iterator[None]:
    """What vLLM's process is to inherit."""
    if case.kernels != "invariant":
        yield
        return
    os.environ[INVARIANT] = "1"
    try:
        yield
    finally:
        del os.environ[INVARIANT]


def with_vllm(config: Config, **values: Any) -> Config:
    """The configuration with other values in `rollout.vllm`."""
    vllm = config.rollout.vllm.model_copy(update=values)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"vllm": vllm})})
