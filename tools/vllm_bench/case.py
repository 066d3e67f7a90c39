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

    kernels: vllm, exact (`rollout.numerics`), or invariant (vLLM's own that do not depend on
    the batch). place: directory for the sampler's log and checkpoint.
    """

    scheme: str
    kernels: str
    process: str
    device: torch.device
    place: Path

    def labels(self) -> Record:
        return {"scheme": self.scheme, "kernels": self.kernels, "process": self.process}


def engine_config(
    case: Case,
    quant: QuantConfig,
    options: argparse.Namespace,
    *,
    prompt_tokens: int,
    new_tokens: int,
    max_seqs: int,
    publish: str,
) -> Config:
    """The configuration of a run that samples like this. publish: the mode in which vLLM starts."""
    on_gpu = case.device.type == "cuda"
    eager = options.eager or not on_gpu
    args = {} if eager else {"cudagraph_capture_sizes": sorted(options.capture_sizes)}
    vllm = {
        "process": case.process,
        "memory_frac": options.memory_frac,
        "enforce_eager": eager,
        "publish": publish,
        "max_restarts": 0,
        "args": args,
    }
    rollout = {
        "engine": "vllm",
        "numerics": "exact" if case.kernels == "exact" else "fast",
        "max_response_length": new_tokens,
        "max_num_seqs": max_seqs,
        "max_batched_tokens": max(8192 if on_gpu else 512, max_seqs),
        "ignore_eos": True,
        "vllm": vllm,
    }
    train = {"steps": 1, "run_dir": str(case.place), "seed": options.seed} | (
        {} if options.threads is None else {"threads": options.threads}
    )
    return Config.model_validate(
        {
            "model": {"path": "random/model", "device": case.device.type},
            "quant": quant.model_dump(),
            "rollout": rollout,
            "data": {"source": "task:arithmetic", "max_prompt_length": prompt_tokens},
            "reward": {"functions": [{"name": "exact"}]},
            "train": train,
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
