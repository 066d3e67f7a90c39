"""The `rollout.vllm` section: placement, GPU memory and weight publishing of vLLM."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, JsonValue

from qarl.inputs.limits import DEVICES, FILES, SECONDS
from qarl.inputs.section import Fault, Field, Section, notice

# vLLM engine arguments, and the configuration key that sets each.
ARGS_BY_KEY = {
    "model": "model.path",
    "tokenizer": "model.path",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "max_model_len": "model.max_length",
    "quantization": "quant.scheme",
    "kv_cache_dtype": "quant.kv_cache_dtype",
    "kv_cache_dtype_skip_layers": "quant.kv_cache_dtype",  # all layers have the same dtype
    "calculate_kv_scales": "quant.kv_cache_dtype",  # the scale is always 1
    "seed": "train.seed",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_batched_tokens",
    "kv_cache_memory_bytes": "rollout.kv_cache_tokens",
    "num_gpu_blocks_override": "rollout.kv_cache_tokens",
    "gpu_memory_utilization": "rollout.vllm.memory_frac",
    "enforce_eager": "rollout.vllm.enforce_eager",
    "enable_chunked_prefill": "rollout.max_batched_tokens",
    "enable_sleep_mode": "rollout.vllm.sleep_level",
}
# Arguments that publishing, log-probs or the sampler's single process depend on.
ARGS_FIXED = (
    "convert",
    "distributed_executor_backend",
    "enable_prefix_caching",
    "enable_return_routed_experts",
    "generation_config",
    "hf_overrides",
    "kernel_config",
    "linear_backend",
    "linear_backend_per_quant",
    "load_format",
    "logits_processors",
    "logprobs_mode",
    "max_logprobs",
    "model_impl",
    "model_weights",
    "override_generation_config",
    "quantization_config",
    "runner",
    "skip_tokenizer_init",
    "weight_transfer_config",
    "worker_cls",
    "worker_extension_cls",
)
# Arguments for several GPUs, and what to do instead.
ARGS_OF_ONE = {
    "tensor_parallel_size": "set rollout.vllm.tensor_parallel",
    "data_parallel_size": "set rollout.vllm.data_parallel",
    "pipeline_parallel_size": "leave it out",
    "prefill_context_parallel_size": "leave it out",
    "decode_context_parallel_size": "leave it out",
    "nnodes": "leave it out",
}
# Arguments that affect scheduling only, not results.
EXACT_ARGS = (
    "async_scheduling",
    "cudagraph_capture_sizes",
    "long_prefill_token_threshold",
    "max_long_partial_prefills",
    "max_num_partial_prefills",
    "prefix_caching_hash_algo",
    "scheduling_policy",
)

# Defaults of `memory_frac`. Below vLLM's 0.9, because a publish needs GPU memory outside of vLLM's share.
SHARED_GPU_FRAC, OWN_GPU_FRAC = 0.4, 0.85


Restarts = Annotated[
    int,
    Field(ge=0, le=FILES, description="Restarts of a failed sampler per run; one more failure ends the run."),
]


def _supported(publish: Any) -> Any:
    """Accept `changed`, a mode of earlier versions that sent only changed layers.

    It was removed because nearly every layer changes in every step, so that it sent 99.8 % of the bytes.
    """
    if publish != "changed":
        return publish
    notice("rollout.vllm.publish: changed is no longer supported; using full, which gives the same results")
    return "full"


class VLLMConfig(Section):
    """Used if `rollout.engine` is vllm."""

    process: Literal["separate", "inline"] = Field(
        "separate",
        description="Where vLLM runs: in a separate process, restarted when it fails, or in the learner's (inline).",
    )
    device: int | None = Field(
        None,
        ge=0,
        lt=DEVICES,
        description="CUDA index of a separate GPU for the sampler of the first rank; other ranks use the next indices. "
        "null: share the learner's GPU.",
    )
    data_parallel: int | None = Field(
        None,
        ge=1,
        le=DEVICES,
        description="Number of vLLM replicas. They run on the lowest-numbered eligible ranks. null: one per eligible "
        "rank; with tensor_parallel, one per group of that many ranks.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=DEVICES,
        description="Number of GPUs that share one vLLM model (tensor parallelism): consecutive ones, from `device` or "
        "the rank's own GPU on.",
    )
    memory_frac: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Fraction of the GPU's memory for vLLM's weights and KV cache. null: 0.4, or 0.85 with "
        "rollout.async, with which vLLM has its own GPU.",
    )
    enforce_eager: bool | None = Field(
        None, description="Disable torch.compile and CUDA graphs. null: true on the CPU, false on CUDA."
    )
    sleep_level: Literal[0, 1, 2] | None = Field(
        None,
        description="What the sampler frees on a GPU while the learner trains. 0: nothing; 1: KV cache, and weights "
        "move to pinned host memory; 2: KV cache and weights. null: 2, or 1 with publish delta.",
    )
    publish: Annotated[Literal["full", "delta"], BeforeValidator(_supported)] = Field(
        "full",
        description="What is sent to vLLM with new weights: every tensor (full), or the changed 32-bit words of each "
        "tensor (delta).",
    )
    staging: bool = Field(
        True,
        description="With numerics fast on a GPU, keep copies of published tensors that vLLM repacks, so that a "
        "publish replays one CUDA graph. Takes as much memory as these layers.",
    )
    timeout_s: float = Field(
        600.0, gt=0, le=SECONDS, description="Seconds without a sign of life after which the sampler counts as hung."
    )
    max_restarts: Restarts = 2
    args: dict[str, JsonValue] = Field({}, description="Further vLLM engine arguments by name, e.g. {block_size: 32}.")

    @property
    def sleep(self) -> int:
        """`sleep_level`, or its default."""
        if self.sleep_level is not None:
            return self.sleep_level
        return 1 if self.publish == "delta" else 2

    @property
    def spans(self) -> bool:
        """Whether one vLLM uses the GPUs of several ranks."""
        return self.tensor_parallel > 1 and self.device is None

    def samplers(self, ranks: int) -> range:
        """The ranks that run vLLM, out of `ranks`."""
        every = range(0, ranks, self.tensor_parallel if self.spans else 1)
        return every if self.data_parallel is None else every[: self.data_parallel]

    def faults(self) -> Iterator[Fault]:
        if self.process == "inline" and self.device is not None:
            yield self.fault("device", "process inline samples on the learner's own GPU; use separate, or leave null")
        if self.tensor_parallel > 1:
            yield from self._tensor_parallel_faults()
        for name, value in self.args.items():
            if name in ARGS_BY_KEY:
                yield Fault(("args", name), value, f"is decided elsewhere; set {ARGS_BY_KEY[name]}")
            elif name in ARGS_FIXED:
                yield Fault(("args", name), value, "is set by qarl; leave it out")
            elif name in ARGS_OF_ONE and value != 1:
                yield Fault(("args", name), value, f"qarl starts a process for each GPU; {ARGS_OF_ONE[name]}")
            elif not name.isidentifier():
                fix = f"write {name.replace('-', '_')}" if name.replace("-", "_").isidentifier() else "leave it out"
                yield Fault(("args", name), value, f"is not the name of an engine argument; {fix}")

    def _tensor_parallel_faults(self) -> Iterator[Fault]:
        if self.process == "inline":
            yield self.fault("process", "runs vLLM in one process, but tensor_parallel needs several; use separate")
        if self.publish == "delta":
            text = "sends changed words of whole tensors, but with tensor_parallel each GPU has a part; use full"
            yield self.fault("publish", text)
        if "async_scheduling" in self.args:
            text = "depends on timing, but with tensor_parallel all GPUs must schedule the same; leave it out"
            yield Fault(("args", "async_scheduling"), self.args["async_scheduling"], text)
