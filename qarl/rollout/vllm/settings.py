"""Settings, requests and responses that are sent between the learner and the sampler. Imports no torch and no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qarl.types import FinishReason

if TYPE_CHECKING:
    from qarl.rollout.engine import SamplingParams

# vLLM's engine must run in the caller's process, which accesses the model. Nothing is downloaded or reported, no kernel
# is compiled on demand, and sockets are opened on the loopback interface only.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # reloads of weights are only tested with the V1 model runner
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
EXACT_MODEL = "QarlExact"  # name of `ExactModel` in vLLM's model registry
InFlight = Literal["wait", "keep_kv", "recompute_kv"]  # see rollout.async.in_flight
KV_FP8 = "qarl_kv_fp8"  # key in vLLM's additional_config: `ExactModel` stores keys and values in e4m3


def vllm_environment(given: Mapping[str, str], numerics: str, threads: int | None) -> dict[str, str]:
    """Return environment variables that must be set before vLLM is imported. Variables in `given` keep their values.

    Args:
        given: The current environment.
        numerics: `exact`, `fast` or `native`.
        threads: Number of CPU threads. Default: vLLM's default.
    """
    own = {name: given.get(name, value) for name, value in ENVIRONMENT.items()}
    if numerics == "exact":  # batch-invariant vLLM would replace torch's matmul and softmax
        own["VLLM_BATCH_INVARIANT"] = "0"
    if threads is not None:  # by default vLLM leaves one core to an API server
        own["OMP_NUM_THREADS"] = given.get("OMP_NUM_THREADS", str(threads))
    return own


@dataclass(frozen=True)
class SamplerSettings:
    """How vLLM is started.

    Attributes:
        checkpoint: Directory of the model that vLLM loads.
        arguments: Arguments of `vllm.LLM`.
        numerics: `exact`: the policy's forward with qarl's kernels. `fast`: vLLM's model and kernels.
        on_gpu: Whether vLLM runs on a GPU.
        staging: Keep a copy of the published tensors of layers that vLLM repacks.
        routing: Whether calls may record the experts that tokens are routed to.
        shard: Tensor parallel rank of this process.
        shards: Number of tensor parallel processes.
        rendezvous: Rendezvous file of the tensor parallel processes, in a private directory; None for one process.
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
    """A prompt to sample one response to. seed: seed of its random numbers, in [0, 2^63)."""

    token_ids: list[int]
    seed: int


@dataclass(frozen=True)
class Response:
    """A sampled response.

    Attributes:
        logprobs: Log-prob of each token in nats.
        stopped_by: The stop token id or stop string; None at the length limit.
        routing: Bytes of `Rollout.routing`, if requested.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    stopped_by: int | str | None
    routing: bytes = b""


Partial = tuple[list[int], list[float], list[int]]  # token ids, log-probs and policy versions so far


@dataclass(frozen=True)
class AsyncSettings:
    """How the sampler's process builds its model.

    Attributes:
        config: The run's configuration as YAML.
        device: The sampler's device, by the process's own device numbering.
        max_length: The model's context length in tokens.
        longest: Tokens of the data's longest prompt plus `max_response_length`.
        sequences: Maximum number of responses in progress.
        sampling: Sampling parameters. `seed` is not used; each group has its own.
        threads: Number of torch threads on a CPU; None on a GPU.
    """

    config: str
    device: str
    max_length: int
    longest: int
    sequences: int
    sampling: SamplingParams
    threads: int | None


@dataclass(frozen=True)
class Group:
    """Order for responses to one prompt.

    Attributes:
        number: Number of the group in the run.
        prompt_id: `Prompt.id`.
        token_ids: Token ids of the prompt.
        seed: Seed of the random numbers.
        samples: Numbers of the samples to generate.
        partial: Samples that already have tokens, by sample number.
    """

    number: int
    prompt_id: int
    token_ids: list[int]
    seed: int
    samples: list[int]
    partial: dict[int, Partial] = field(default_factory=dict)
