"""The `rollout` section: engine, sampling parameters, dynamic sampling and asynchronous rollouts."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from qarl.config.by_device import ByDevice
from qarl.config.vllm import EXACT_ARGS, OWN_GPU_FRAC, SHARED_GPU_FRAC, Restarts, VLLMConfig
from qarl.inputs.limits import (
    DEVICES,
    IDS,
    ITEMS,
    MOST_STALE,
    POOL_TOKENS,
    SAMPLES,
    SECONDS,
    SEQUENCES,
    SMALLEST_TEMPERATURE,
    TEMPERATURE,
    TOKENS,
    VOCABULARY,
)
from qarl.inputs.section import Fault, Field, Name, PathName, Renamed, Section

TopP = Annotated[
    float,
    Field(gt=0, le=1, description="Sample from the smallest set of tokens with this total probability; 1 is off."),
]
TopK = Annotated[int, Field(ge=0, le=VOCABULARY, description="Sample from the k most probable tokens; 0 is off.")]
MinP = Annotated[
    float,
    Field(ge=0, lt=1, description="Drop tokens less probable than this fraction of the most probable; 0 is off."),
]


class DynamicSampling(Section):
    """Drop groups whose rewards are all equal, and sample more prompts until the step is full (DAPO)."""

    max_rounds: int = Field(
        4,
        ge=1,
        le=1000,
        description="Maximum sampling rounds per step. If groups are still missing, groups of equal rewards fill the "
        "step.",
    )
    oversample: float = Field(
        1.0, ge=1, le=16, description="Prompts per round, as a multiple of those that the step still lacks; rounded up."
    )


class AsyncConfig(Section):
    """Asynchronous rollouts: an engine in a separate process samples the next steps while the learner trains.

    On GPUs, the engine has its own GPU. By default each step has the same prompts as without this section.
    """

    max_staleness: int = Field(
        1,
        ge=0,
        le=MOST_STALE,
        description="Maximum age of a token in steps, relative to the policy that learns from it. 0: same bits as a "
        "synchronous run.",
    )
    publish_every: int = Field(
        1,
        ge=1,
        le=MOST_STALE + 1,
        description="Publish every n-th weight version to the sampler. Above 1, responses are interrupted less often, "
        "but the sampler gets prompts for fewer steps ahead, because its weights may already be n - 1 "
        "versions old.",
    )
    in_flight: Literal["wait", "keep_kv", "recompute_kv"] = Field(
        "wait",
        description="Unfinished responses when new weights arrive. wait: finish them with the old weights first "
        "(reproducible); recompute_kv: continue with the new weights and recomputed keys and values (exact); keep_kv: "
        "continue with the old keys and values (faster, not exact).",
    )
    order: Literal["prompts", "finished"] = Field(
        "prompts",
        description="Order in which steps consume groups. prompts: data order, waiting for long responses; finished: "
        "complete groups first, unfinished ones in a later step (partial rollouts) within max_staleness.",
    )
    oversample: float = Field(
        1.0,
        ge=1,
        le=16,
        description="Groups started per step, as a multiple of those that the step trains on; rounded up. The step "
        "trains on the first groups that complete, and the others are cancelled: an alternative to order: "
        "finished, biased towards short responses.",
    )
    proximal: Literal["sampled", "newest"] = Field(
        "sampled",
        description="Policy version of logp_old. sampled: the version that sampled each token, from kept codes; "
        "newest: the policy at the start of the step, so that corrections include staleness (decoupled PPO).",
    )
    verify_frac: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Fraction of the responses of earlier versions whose logp_old the learner recomputes. The others "
        "use the sampler's log-probs, which are bit-identical, and save a learner forward.",
    )
    kept_versions: Literal["auto", "device", "host"] = Field(
        "auto",
        description="Where the learner keeps the quantized weights of earlier versions, for logp_old. device: ready to "
        "run; host: in pinned host memory, copied to the device one version at a time (same bits); auto: host if the "
        "memory estimate says that they do not fit on the GPU.",
    )
    device: int | None = Field(
        None,
        ge=0,
        lt=DEVICES,
        description="CUDA index of the first rank's sampler; the other ranks use the next indices. null: the first "
        "index after the learners'.",
    )
    timeout_s: float = Field(
        600.0, ge=10, le=SECONDS, description="Seconds without a sign of life after which the sampler counts as hung."
    )
    max_restarts: Restarts = 2

    @property
    def exact(self) -> bool:
        """Whether the sampler's log-probs equal, bit for bit, the learner's at the version of each token."""
        return self.in_flight != "keep_kv" and self.proximal == "sampled"

    @property
    def steps_ahead(self) -> int:
        """Steps after the current one for which the sampler has prompts."""
        return self.max_staleness - (self.publish_every - 1)

    def faults(self) -> Iterator[Fault]:
        if self.steps_ahead < 0:
            text = (
                "the sampler's weights would be older than max_staleness; must be at most max_staleness + 1, "
                f"which is {self.max_staleness + 1}"
            )
            yield self.fault("publish_every", text)
        if self.verify_frac < 1 and not self.exact:
            key = "in_flight: keep_kv" if self.in_flight == "keep_kv" else "proximal: newest"
            yield self.fault("verify_frac", f"with {key} the sampler's log-probs are not those of logp_old; must be 1")
        if self.oversample > 1 and self.order == "finished":
            text = (
                "order: finished continues unfinished responses instead of cancelling them; must be 1, or use prompts"
            )
            yield self.fault("oversample", text)


class RolloutConfig(Section):
    """The rollout engine and its sampling parameters."""

    renamed: ClassVar = {"kernels": Renamed("linear_kernels", {"native": "vllm", "qarl": "qarl"})}
    engine: Literal["native", "vllm", "data"] = Field(
        "native",
        description="native: qarl's engine in the learner's process, on the policy's modules and quantized tensors; "
        "vllm: vLLM, with new weights published after every step; data: no sampling, the data give the responses "
        "(objectives sft and distill).",
    )
    numerics: Literal["exact", "fast"] | None = Field(
        None,
        description="For engine vllm. exact: qarl's forward inside vLLM, bit-identical to the learner's; fast: vLLM's "
        "own model, attention and sampler. null: exact if available, else fast. exact is unavailable with "
        "tensor_parallel above 1, with engine arguments that may change results, and on a GPU with model.dtype float32 "
        "or quant.kernels reference.",
    )
    linear_kernels: Literal["vllm", "qarl"] | None = Field(
        None,
        description="Legacy key for engine vllm: vllm selects numerics fast, qarl selects numerics exact.",
    )
    n: int = Field(
        8, ge=1, le=SAMPLES, description="Responses per prompt (the group size of group-relative advantages)."
    )
    temperature: float = Field(
        1.0,
        ge=SMALLEST_TEMPERATURE,
        le=TEMPERATURE,
        description="Sampling temperature: divides the logits. Log-probs are those after division.",
    )
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    max_response_length: int = Field(
        256,
        ge=1,
        le=TOKENS,
        description="Maximum response length in tokens; longer responses are cut and count as truncated.",
    )
    stop: list[Name] = Field([], max_length=ITEMS, description="Strings that end a response; not part of its text.")
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=VOCABULARY)]] = Field(
        [], max_length=IDS, description="Token ids that end a response, in addition to the model's end of sequence."
    )
    ignore_eos: bool = Field(False, description="Continue after the model's end of sequence (for benchmarks).")
    max_num_seqs: ByDevice = Field(
        None,
        ge=1,
        le=SEQUENCES,
        description="Maximum sequences decoded together. null: 64 on a CPU; on a GPU 256 with vllm, up to 512 with "
        "native, and up to 384 with rollout.async, as memory allows.",
    )
    max_batched_tokens: ByDevice = Field(
        None,
        ge=1,
        le=TOKENS,
        description="Token budget of an engine step, for prefill chunks and decodes together. null: 512 on a CPU; on a "
        "GPU 8,192 (vllm) or 4,096 (native). With vllm, at least max_num_seqs.",
    )
    kv_cache_tokens: int | None = Field(
        None,
        ge=1,
        le=POOL_TOKENS,
        description="KV cache size in tokens. null: max_num_seqs full-length sequences, or for vLLM on a GPU what "
        "vllm.memory_frac leaves. When the cache is full, sequences are preempted.",
    )
    dynamic_sampling: DynamicSampling | None = Field(
        None, description="Train only on groups whose rewards differ, and sample until the step is full; null: off."
    )
    # `async` is a keyword of Python, and the word that users of other frameworks look for.
    __annotations__["async"] = "AsyncConfig | None"
    vars()["async"] = Field(None, description="Sample the next steps while the learner trains; null: alternate.")
    replay: PathName | None = Field(
        None,
        description="Directory of a run whose recorded responses replace sampling, to repeat it exactly. That "
        "run must have logging.rollouts_every: 1.",
    )
    vllm: VLLMConfig = Field(default_factory=VLLMConfig, description="Settings of engine vllm.")

    @property
    def asynchronous(self) -> AsyncConfig | None:
        """The section `async`."""
        found = getattr(self, "async")
        assert found is None or isinstance(found, AsyncConfig)
        return found

    @property
    def samples_ahead(self) -> bool:
        """Whether a process of its own samples the next steps. With `replay`, asynchronous rollouts sample nothing."""
        return self.asynchronous is not None and self.replay is None

    @property
    def exact(self) -> bool:
        """Whether the sampler computes with the learner's own operations. `numerics` is resolved."""
        return self.engine == "native" or (self.engine == "vllm" and self.numerics == "exact")

    @property
    def own_gpu(self) -> bool:
        """Whether vLLM has a GPU of its own, if there are GPUs."""
        return self.asynchronous is not None or self.vllm.device is not None

    @property
    def memory_frac(self) -> float:
        """`vllm.memory_frac`, or its default."""
        return self.vllm.memory_frac or (OWN_GPU_FRAC if self.asynchronous is not None else SHARED_GPU_FRAC)

    @property
    def inexact(self) -> str:
        """The key of this section that rules out exact numerics in vLLM; "" if none does."""
        if self.linear_kernels == "vllm":
            return "rollout.linear_kernels: vllm"
        if self.vllm.tensor_parallel > 1:
            return "rollout.vllm.tensor_parallel"
        other = next((name for name in self.vllm.args if name not in EXACT_ARGS), None)
        return f"rollout.vllm.args.{other}" if other else ""

    def samplers(self, ranks: int) -> range:
        """The ranks that sample responses, out of `ranks`."""
        return self.vllm.samplers(ranks) if self.engine == "vllm" else range(ranks)

    @property
    def spans(self) -> bool:
        """Whether a rank's sampler may use the GPUs of other ranks."""
        return self.engine == "vllm" and self.vllm.spans

    @property
    def restarts_s(self) -> float:
        """Maximum seconds spent on restarts of a sampler: detecting the hang, and starting a new process."""
        if (ahead := self.asynchronous) is not None:
            return 2 * ahead.timeout_s * ahead.max_restarts
        return 2 * self.vllm.timeout_s * self.vllm.max_restarts if self.engine == "vllm" else 0.0

    @property
    def sampler_text(self) -> str:
        """Name of the sampler for reports."""
        if self.engine != "vllm":
            return "native engine" if self.engine == "native" else "given responses"
        return "vLLM, exact numerics" if self.numerics == "exact" else "vLLM"

    def faults(self) -> Iterator[Fault]:
        if self.replay is not None and self.dynamic_sampling is not None:
            yield self.fault(
                "replay", "repeats recorded groups, without sampling more; leave rollout.dynamic_sampling out"
            )
        if self.replay is not None and self.engine != "native":
            yield self.fault("engine", "rollout.replay needs a sampler for evaluations only; use engine native")
        if self.engine == "data":
            yield from self._given_faults()
            return
        if self.asynchronous is not None and self.engine == "vllm":
            yield from self._async_vllm_faults()
        if self.linear_kernels == "qarl" and self.engine == "native":
            yield self.fault(
                "linear_kernels", "engine native runs qarl's kernels anyway; leave vllm, or use engine vllm"
            )
        exact = self.engine == "vllm" and (self.numerics == "exact" or self.linear_kernels == "qarl")
        if exact:
            yield from self._exact_faults()
        if exact and self.vllm.tensor_parallel > 1:
            text = "rounds partial sums that the learner computes in one product; with numerics exact it must be 1"
            yield self.fault("vllm.tensor_parallel", text)
        both = self.max_batched_tokens is not None and self.max_num_seqs is not None
        if self.engine == "vllm" and both and self.max_batched_tokens < self.max_num_seqs:
            yield self.fault(
                "max_batched_tokens",
                f"vLLM needs a token for each of the rollout.max_num_seqs = {self.max_num_seqs} sequences; must be "
                f"{self.max_num_seqs} or more",
            )

    def _async_vllm_faults(self) -> Iterator[Fault]:
        """Settings of vLLM that its asynchronous process, which has one GPU, does not support."""
        vllm = self.vllm
        if vllm.process == "inline":
            yield self.fault("vllm.process", "rollout.async samples in a process of its own; use separate")
        if vllm.device is not None:
            yield self.fault("vllm.device", "with rollout.async, rollout.async.device is the sampler's GPU; leave null")
        if vllm.tensor_parallel > 1:
            text = (
                "with rollout.async requests arrive at any time, but all GPUs of a model must schedule the same; use 1"
            )
            yield self.fault("vllm.tensor_parallel", text)
        if vllm.publish == "delta":
            yield self.fault("vllm.publish", "rollout.async sends every tensor; use full")

    def _given_faults(self) -> Iterator[Fault]:
        """Sampling settings that have no effect on given responses."""
        if self.n != 1:
            yield self.fault("n", "engine data has one response per row; must be 1")
        for key in ("async", "dynamic_sampling"):
            if getattr(self, key) is not None:
                yield self.fault(key, "engine data samples nothing; leave it out")
        if self.replay is not None:
            yield self.fault("replay", "engine data takes its responses from the data; leave it out")

    def _exact_faults(self) -> Iterator[Fault]:
        if self.linear_kernels == "vllm":
            yield self.fault("linear_kernels", "rollout.numerics: exact runs qarl's kernels; leave null")
        for name, value in self.vllm.args.items():
            if name not in EXACT_ARGS:
                text = "may change what is computed, and rollout.numerics is exact; leave it out, or use numerics fast"
                yield Fault(("vllm", "args", name), value, text)
