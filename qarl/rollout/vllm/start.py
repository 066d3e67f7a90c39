"""How vLLM starts: what is imported first, and the engine arguments.

Importing this module does not import vLLM; its functions do.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from qarl_kernels.attention import PAGE

from qarl.rollout.vllm.numerics import Numerics
from qarl.rollout.vllm.phases import Phases
from qarl.rollout.vllm.settings import EXACT_MODEL, KV_FP8, SamplerSettings

if TYPE_CHECKING:
    from vllm import LLM

# Batches of decodes that CUDA graphs are captured for; a batch runs in the next larger one.
STEPS = ((1, 2, 4, 8), range(16, 128, 16), range(128, 513, 32))


def import_ahead(exact: bool) -> None:
    """Import the modules that a start needs, in a prepared environment. A failing import fails again at the start.

    exact: for `rollout.numerics: exact`.
    """
    names = ["vllm.entrypoints.llm", "vllm.v1.engine.core"]
    names.append(f"qarl.rollout.vllm.{'exact' if exact else 'own_kernels'}.numerics")
    with suppress(Exception):
        from vllm.platforms import current_platform

        names.append(f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker")
    for name in names:
        with suppress(Exception):
            import_module(name)


def start_vllm(settings: SamplerSettings, numerics: Numerics, phases: Phases) -> LLM:
    """vLLM with the model in `settings.checkpoint`. Raises whatever vLLM raises."""
    from vllm import LLM

    from qarl.rollout.vllm.sampling import batch_seeded_noise

    batch_seeded_noise()
    with numerics.starting():
        phases.end("imports")
        with phases.of_worker(numerics.loaded):
            return LLM(str(settings.checkpoint), **engine_arguments(settings))


def engine_arguments(settings: SamplerSettings) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    arguments: dict[str, Any] = {
        "dtype": settings.dtype,
        "max_model_len": settings.context,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": True,  # the responses to a prompt share its prefill
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are sampled from
        "generation_config": "vllm",  # no sampling parameters from the model's directory
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if settings.cuda is None:
        # On the CPU vLLM cannot take back the random numbers that a seeded request uses up in the middle of its prompt
        # (0.24 to 0.32), so prompts are not split.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(settings.max_batched_tokens, settings.context)
    else:
        arguments |= {"gpu_memory_utilization": settings.memory_frac, "enable_sleep_mode": settings.sleep}
    if settings.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    own = _exact_arguments(settings) if settings.numerics == "exact" else _fast_arguments(settings)
    return arguments | own | dict(settings.args)


def _exact_arguments(settings: SamplerSettings) -> dict[str, Any]:
    # The model reads the checkpoint's quantization itself.
    overrides = {"architectures": [EXACT_MODEL], "quantization_config": None}
    arguments: dict[str, Any] = {"hf_overrides": overrides, "block_size": PAGE}
    if settings.kv_fp8:  # not `kv_cache_dtype`, which asks vLLM's own attention
        arguments["additional_config"] = {KV_FP8: True}
    if settings.cuda is None:
        arguments["enforce_eager"] = True
    elif not settings.enforce_eager:  # torch compiles nothing: the policy's kernels are what they are
        arguments |= {
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_num_of_warmups": 1},
            "cudagraph_capture_sizes": graph_sizes(settings.max_num_seqs),
            "enable_flashinfer_autotune": False,  # nothing of it runs
        }
    return arguments


def _fast_arguments(settings: SamplerSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if settings.shards > 1:
        arguments |= {
            "tensor_parallel_size": settings.shards,
            "distributed_executor_backend": "external_launcher",
            "disable_custom_all_reduce": True,  # it asks for GPUs that this process does not see; sums go over NCCL
            "async_scheduling": False,  # decides by timing, which may differ between the processes
        }
        if settings.cuda is not None:
            arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if settings.kv_fp8:
        arguments["kv_cache_dtype"] = "fp8"
    return arguments


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that graphs are captured for; the largest is `max_num_seqs`, as far as there are graphs."""
    steps = [size for part in STEPS for size in part]
    return [size for size in steps if size < max_num_seqs] + [min(max_num_seqs, steps[-1])]
