"""The engine arguments that vLLM is started with."""

from __future__ import annotations

import json
from typing import Any

from qarl_kernels.attention import PAGE

from qarl.rollout.vllm.settings import KV_FP8, SamplerSettings

# Batches of decodes that CUDA graphs are captured for; a batch runs in the next larger one.
STEPS = ((1, 2, 4, 8), range(16, 128, 16), range(128, 513, 32))


def engine_arguments(settings: SamplerSettings) -> dict[str, Any]:
    """By the names of `vllm.LLM`."""
    arguments: dict[str, Any] = {
        "dtype": settings.dtype,
        "max_model_len": settings.context,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": True,  # the responses to a prompt share its prefill
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are drawn from
        "generation_config": "vllm",  # no sampling parameters from the model's directory
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if settings.cuda is None:
        # vLLM cannot take back the random numbers that a seeded request uses up in the middle of its prompt on the CPU
        # (0.24 to 0.32), so prompts are not cut.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(settings.max_batched_tokens, settings.context)
    else:
        arguments |= {"gpu_memory_utilization": settings.memory_frac, "enable_sleep_mode": settings.sleep}
    if settings.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    if settings.shards > 1:
        arguments |= _cut_arguments(settings)
    overrides: dict[str, Any] = {}
    if settings.linear_kernels == "qarl" and settings.scheme == "bf16":
        overrides["quantization_config"] = {"quant_method": "qarl-dense"}
    if settings.numerics == "exact":
        overrides["architectures"] = [_exact_architecture(settings)]
        arguments |= _exact_arguments(settings)
    elif settings.kv_fp8:
        arguments["kv_cache_dtype"] = "fp8"
    if overrides:
        arguments["hf_overrides"] = overrides
    return arguments | dict(settings.args)


def _cut_arguments(settings: SamplerSettings) -> dict[str, Any]:
    """Of a process that holds a part of the model. Sums go over NCCL: others ask for GPUs that it does not see."""
    arguments: dict[str, Any] = {
        "tensor_parallel_size": settings.shards,
        "distributed_executor_backend": "external_launcher",
        "disable_custom_all_reduce": True,
        "async_scheduling": False,  # it schedules by what is done when, which may differ between the processes
    }
    if settings.cuda is not None:
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    return arguments


def _exact_architecture(settings: SamplerSettings) -> str:
    """The name under which vLLM knows the checkpoint's model with the policy's forward."""
    from qarl.rollout.vllm.exact.model import register

    (architecture,) = json.loads((settings.checkpoint / "config.json").read_text())["architectures"]
    return register(architecture)


def _exact_arguments(settings: SamplerSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {"block_size": PAGE}
    if settings.kv_fp8:  # vLLM's own attention is not asked to take what the policy's does
        arguments["additional_config"] = {KV_FP8: True}
    if settings.cuda is None:
        arguments["enforce_eager"] = True
    elif not settings.enforce_eager:  # nothing is compiled by torch: the policy's kernels are what they are
        arguments |= {
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_num_of_warmups": 1},
            "cudagraph_capture_sizes": graph_sizes(settings.max_num_seqs),
            "enable_flashinfer_autotune": False,  # nothing of it runs
        }
    return arguments


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Of the batches that graphs are captured for: the largest is `max_num_seqs`, as far as there are graphs."""
    steps = [size for part in STEPS for size in part]
    return [size for size in steps if size < max_num_seqs] + [min(max_num_seqs, steps[-1])]
