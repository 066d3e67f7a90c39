"""Settings, requests and responses that pass between the two sides of the vLLM engine. Imports no torch, no vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qarl.types import FinishReason

# vLLM's engine runs in the process of the caller, which needs the model. Nothing is downloaded or reported, no kernel
# is compiled on the fly, and sockets open on the loopback interface only.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # reloads are tested with this one
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
EXACT_MODEL = "QarlExact"  # name of the policy's forward in vLLM's registry of models
InFlight = Literal["wait", "keep_kv", "recompute_kv"]  # see rollout.async.in_flight
KV_FP8 = "qarl_kv_fp8"  # key of vLLM's additional configuration: the policy's forward keeps keys and values in e4m3


def vllm_environment(given: Mapping[str, str], numerics: str, threads: int | None) -> dict[str, str]:
    """Return the variables that must be set before vLLM is imported; those in `given` keep their values.

    threads: Number of threads on the CPU; None: vLLM's default.
    """
    own = {name: given.get(name, value) for name, value in ENVIRONMENT.items()}
    if numerics == "exact":  # vLLM would replace torch's products and softmaxes
        own["VLLM_BATCH_INVARIANT"] = "0"
    if threads is not None:  # by default vLLM leaves one out for a server beside it
        own["OMP_NUM_THREADS"] = given.get("OMP_NUM_THREADS", str(threads))
    return own


@dataclass(frozen=True)
class SamplerSettings:
    """How vLLM is started.

    Attributes:
        checkpoint: Directory of the model that vLLM loads.
        arguments: Arguments of `vllm.LLM`.
        numerics: `exact` runs the policy's own forward with qarl's kernels; `fast`: vLLM's model and kernels.
        on_gpu: Whether vLLM runs on a GPU.
        staging: Keep the published tensors of layers that vLLM repacks.
        routing: Whether calls may record the experts that tokens are routed to.
        shard: Index of this process's part of the model, of `shards` parts.
        rendezvous: File in a private directory where the processes of one model meet; None for a whole model.
    """

    checkpoint: Path
    arguments: dict[str, Any]
    numerics: Literal["exact", "fast"]
    on_gpu: bool
    staging: bool = False
    routing: bool = False
    shard: int = 0
    shards: int = 1
    rendezvous: Path | None = None


@dataclass(frozen=True)
class Request:
    """A response to sample. seed: Of its random stream, in [0, 2^63)."""

    token_ids: list[int]
    seed: int


@dataclass(frozen=True)
class Response:
    """A sampled response.

    Attributes:
        stopped_by: The stop token id or stop string; None at the length limit.
        routing: Bytes of `Rollout.routing`, if requested.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    stopped_by: int | str | None
    routing: bytes = b""


def request_seed(seed: int, prompt_id: int, sample: int) -> int:
    """Return the seed of a response's random stream, in [0, 2^63)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}/{sample}".encode()).digest()[:8]) >> 1
