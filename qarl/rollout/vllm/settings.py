"""What passes between the two sides of the vLLM engine. Plain data; imports neither torch nor vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qarl.types import FinishReason

# In process, so that the model is at hand; nothing is fetched or reported; no kernel compiled on the fly; whatever
# still opens a socket does so where no other machine reaches it.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the one whose reload was tried
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
KV_FP8 = "qarl_kv_fp8"  # of vLLM's additional configuration: keys and values of the policy's forward are e4m3


def vllm_environment(
    given: Mapping[str, str], linear_kernels: str, numerics: str, threads: int | None
) -> dict[str, str]:
    """What vLLM must find in the environment of its process before it is imported, beside what is `given`.

    The others: see `SamplerSettings`.
    """
    own = {name: given.get(name, value) for name, value in ENVIRONMENT.items()}
    own["QARL_VLLM_KERNELS"] = linear_kernels
    if numerics == "exact":  # it would put products and softmaxes of vLLM's in the place of torch's
        own["VLLM_BATCH_INVARIANT"] = "0"
    if threads is not None:  # vLLM's own choice leaves one out, for a server that works beside it
        own["OMP_NUM_THREADS"] = given.get("OMP_NUM_THREADS", str(threads))
    return own


@dataclass(frozen=True)
class SamplerSettings:
    """How vLLM is started.

    checkpoint: directory. dtype: of activations. scheme: its name. context: tokens of prompt and response.
    kv_cache_bytes: of all layers, None: what `memory_frac` of the GPU leaves. sleep: its memory can be given back.
    staging: the published tensors of repacked layers are kept. linear_kernels: whose; numerics: exact is the policy's
    own forward, with qarl's. kv_fp8: see `quant.kv_cache_dtype`. routing: calls may ask which experts tokens went
    through. cuda: index of the GPU, None on the CPU. threads: on the CPU. args: further engine arguments. shard: which
    of `shards` parts of the model this process holds. meeting: file in a private directory that the processes of one
    model meet in, None for a whole one.
    """

    checkpoint: Path
    dtype: str
    scheme: str
    context: int
    max_num_seqs: int
    max_batched_tokens: int
    kv_cache_bytes: int | None
    memory_frac: float
    enforce_eager: bool
    sleep: bool
    staging: bool
    linear_kernels: Literal["vllm", "qarl"]
    cuda: int | None
    numerics: Literal["exact", "fast"] = "fast"
    kv_fp8: bool = False
    routing: bool = False
    threads: int | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    shard: int = 0
    shards: int = 1
    meeting: Path | None = None


@dataclass(frozen=True)
class Request:
    """One response to draw. seed: of its own random stream, in [0, 2^63)."""

    token_ids: list[int]
    seed: int


@dataclass(frozen=True)
class Drawing:
    """How responses are drawn, the same for every request of one call; see `qarl.rollout.engine.SamplingParams`.

    routing: bytes that tell the experts of one token, where they are to be told; 0: they are not.
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    routing: int = 0


@dataclass(frozen=True)
class Response:
    """What was drawn. stopped_by: the stop token id or stop string, None at the length limit. routing: the bytes of
    `Rollout.routing`, where it was asked for."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    stopped_by: int | str | None
    routing: bytes = b""


@dataclass(frozen=True)
class Failure:
    """An operation that failed; the sampler goes on serving. publish: the tensors are to blame, not the engine."""

    message: str
    publish: bool


def request_seed(seed: int, prompt_id: int, sample: int) -> int:
    """The seed of one response's random stream, in [0, 2^63): it depends on nothing else."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}/{sample}".encode()).digest()[:8]) >> 1
