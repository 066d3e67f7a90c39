"""How responses are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from qarl.config.base import Fault, Field, Renamed, Section, path_faults
from qarl.config.by_device import ByDevice
from qarl.config.limits import (
    DEVICES,
    FILES,
    IDS,
    ITEMS,
    MOST_STALE,
    NAME,
    POOL_TOKENS,
    SAMPLES,
    SECONDS,
    SEQUENCES,
    SMALLEST_TEMPERATURE,
    TEMPERATURE,
    TEXT,
    TOKENS,
    VOCABULARY,
)
from qarl.config.vllm import EXACT_ARGS, VLLMConfig


class DynamicSampling(Section):
    """Drop groups whose rewards are all equal, and sample more prompts until the step is full (DAPO)."""

    max_rounds: int = Field(
        4,
        ge=1,
        le=1000,
        description="Rounds of sampling per step. If the step is short after them, groups of equal rewards fill it.",
    )
    oversample: float = Field(
        1.0, ge=1, le=16, description="A round samples this times the prompts that the step still lacks, rounded up."
    )


class AsyncConfig(Section):
    """Asynchronous rollouts: a native engine in a process of its own samples the next steps while the learner learns.

    On GPUs it has one of its own. The responses of a step are those to the same prompts as without this section.
    """

    max_staleness: int = Field(
        1,
        ge=0,
        le=MOST_STALE,
        description="Steps by which a token may be older than the policy that learns from it. 0 gives the results of "
        "the synchronous run bit for bit.",
    )
    in_flight: Literal["wait", "keep_kv", "recompute_kv"] = Field(
        "wait",
        description="What happens to unfinished responses when new weights arrive. wait: they are finished with the "
        "old weights first, so a run can be repeated bit for bit; recompute_kv: they continue with the new weights, "
        "and their keys and values are computed again (exact); keep_kv: they continue on the old keys and values "
        "(faster, and log-probs are not exact).",
    )
    order: Literal["prompts", "finished"] = Field(
        "prompts",
        description="Which groups a step learns from. prompts: the next ones of the data, also if it waits for a long "
        "response; finished: complete ones first, and unfinished ones in a later step (partial rollouts), within "
        "max_staleness.",
    )
    proximal: Literal["sampled", "newest"] = Field(
        "sampled",
        description="Weights of logp_old. sampled: for each token the version that sampled it, whose codes are kept; "
        "newest: the policy at the start of the step, so that corrections weight by staleness (decoupled PPO).",
    )
    verify_frac: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the responses of earlier versions whose logp_old the learner computes. The others get "
        "the sampler's log-probs, which are the same bit for bit, and save the learner a forward.",
    )
    device: int | None = Field(
        None, ge=0, lt=DEVICES, description="CUDA index of the sampler's GPU. null: the one after the learner's."
    )
    timeout_s: float = Field(
        600.0, gt=0, le=SECONDS, description="Seconds without a sign of life after which the sampler counts as hung."
    )
    max_restarts: int = Field(
        2, ge=0, le=FILES, description="Restarts of a failed sampler per run; one more failure ends the run."
    )

    @property
    def exact(self) -> bool:
        """Whether the sampler's log-probs are those of the learner at the version of each token, bit for bit."""
        return self.in_flight != "keep_kv" and self.proximal == "sampled"

    def faults(self) -> Iterator[Fault]:
        if self.verify_frac < 1 and not self.exact:
            key = "in_flight: keep_kv" if self.in_flight == "keep_kv" else "proximal: newest"
            text = f"with {key} the sampler's log-probs are not those of logp_old; must be 1"
            yield Fault(("verify_frac",), self.verify_frac, text)


class RolloutConfig(Section):
    """The rollout engine and its sampling parameters."""

    renamed: ClassVar = {"kernels": Renamed("linear_kernels", {"native": "vllm", "qarl": "qarl"})}
    engine: Literal["native", "vllm"] = Field(
        "native",
        description="native: in the learner's process, on the policy's own modules and quantized tensors; vllm: vLLM, "
        "to which each version is published.",
    )
    numerics: Literal["exact", "fast"] | None = Field(
        None,
        description="With engine vllm: the policy's own forward inside vLLM, whose log-probs are the learner's bit for "
        "bit (exact), or vLLM's own model, attention and sampler (fast). null: exact, or fast where exact is not "
        "available: with linear_kernels vllm, tensor_parallel above 1, engine arguments that may change results, and "
        "on a GPU with model.dtype float32 or quant.kernels reference. Engine native is always exact.",
    )
    linear_kernels: Literal["vllm", "qarl"] | None = Field(
        None,
        description="With engine vllm, of earlier versions: vllm asks for numerics fast, qarl for numerics exact.",
    )
    n: int = Field(
        8, ge=1, le=SAMPLES, description="Responses per prompt (the group size of group-relative advantages)."
    )
    temperature: float = Field(
        1.0,
        ge=SMALLEST_TEMPERATURE,
        le=TEMPERATURE,
        description="Logits are divided by it; log-probs are reported after it.",
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Smallest set of tokens with this probability; 1 is off.")
    top_k: int = Field(0, ge=0, le=VOCABULARY, description="Only the k most probable tokens; 0 is off.")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Drop tokens less probable than this fraction of the most probable; 0 is off."
    )
    max_response_length: int = Field(
        256, ge=1, le=TOKENS, description="Tokens; a longer response is cut and counts as truncated."
    )
    stop: list[Annotated[str, Field(min_length=1, max_length=NAME)]] = Field(
        [], max_length=ITEMS, description="Strings that end a response; not part of its text."
    )
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=VOCABULARY)]] = Field(
        [], max_length=IDS, description="Token ids that end a response, beside the model's end of sequence."
    )
    ignore_eos: bool = Field(False, description="Continue after the model's end of sequence (for benchmarks).")
    max_num_seqs: ByDevice = Field(
        None, ge=1, le=SEQUENCES, description="Sequences decoded together; null: as the engine and device allow."
    )
    max_batched_tokens: ByDevice = Field(
        None,
        ge=1,
        le=TOKENS,
        description="Token budget of one engine step: prefill chunks and decodes together; null: as the engine and "
        "device allow.",
    )
    kv_cache_tokens: int | None = Field(
        None,
        ge=1,
        le=POOL_TOKENS,
        description="KV pool size in tokens; default holds max_num_seqs full-length sequences. Sequences are "
        "preempted when it is full.",
    )
    dynamic_sampling: DynamicSampling | None = Field(
        None, description="Train on groups whose rewards differ only, and sample until the step has enough; null: off."
    )
    # `async` is a keyword of Python, and the word that users of other frameworks look for.
    __annotations__["async"] = "AsyncConfig | None"
    vars()["async"] = Field(None, description="Sample while the learner learns; null: one after the other.")
    replay: str | None = Field(
        None,
        min_length=1,
        max_length=TEXT,
        description="Directory of a run whose recorded responses the learner gets, instead of sampling; to repeat a "
        "run exactly. It needs logging.rollouts_every: 1.",
    )
    vllm: VLLMConfig = Field(default_factory=VLLMConfig, description="Settings of engine vllm.")

    @property
    def asynchronous(self) -> AsyncConfig | None:
        """The section `async`."""
        found = getattr(self, "async")
        assert found is None or isinstance(found, AsyncConfig)
        return found

    @property
    def inexact(self) -> str:
        """Which of the section's keys rules out exact numerics in vLLM; "" if none does."""
        if self.linear_kernels == "vllm":
            return "rollout.linear_kernels: vllm"
        if self.vllm.tensor_parallel > 1:
            return "rollout.vllm.tensor_parallel"
        other = next((name for name in self.vllm.args if name not in EXACT_ARGS), None)
        return f"rollout.vllm.args.{other}" if other else ""

    def samplers(self, ranks: int) -> range:
        """The ranks, of so many, that sample responses."""
        return self.vllm.samplers(ranks) if self.engine == "vllm" else range(ranks)

    @property
    def spans(self) -> bool:
        """Whether a rank's sampler may use the GPUs of other ranks."""
        return self.engine == "vllm" and self.vllm.spans

    @property
    def restarts_s(self) -> float:
        """Most seconds that restarts of a sampler take: to detect that it hangs, and to start another."""
        return 2 * self.vllm.timeout_s * self.vllm.max_restarts if self.engine == "vllm" else 0.0

    @property
    def sampler_text(self) -> str:
        """Name of the sampler for reports."""
        if self.engine == "native":
            return "native engine"
        return "vLLM, exact numerics" if self.numerics == "exact" else "vLLM"

    def faults(self) -> Iterator[Fault]:
        yield from path_faults("replay", self.replay)
        if self.replay is not None and self.dynamic_sampling is not None:
            yield Fault(("replay",), self.replay, "records the chosen groups only; leave rollout.dynamic_sampling out")
        if self.replay is not None and self.engine != "native":
            yield Fault(("engine",), self.engine, "rollout.replay samples nothing but evaluations; use engine native")
        if self.asynchronous is not None and self.engine != "native":
            text = "asynchronous rollouts run on engine native; set rollout.engine: native, or leave async out"
            yield Fault(("engine",), self.engine, text)
        if self.linear_kernels == "qarl" and self.engine == "native":
            yield Fault(
                ("linear_kernels",),
                self.linear_kernels,
                "engine native runs qarl's kernels anyway; leave vllm, or use engine vllm",
            )
        exact = self.engine == "vllm" and (self.numerics == "exact" or self.linear_kernels == "qarl")
        if exact:
            yield from self._exact_faults()
        if exact and self.vllm.tensor_parallel > 1:
            text = "rounds sums of parts that the learner adds up in one product; with numerics exact it must be 1"
            yield Fault(("vllm", "tensor_parallel"), self.vllm.tensor_parallel, text)
        both = self.max_batched_tokens is not None and self.max_num_seqs is not None
        if self.engine == "vllm" and both and self.max_batched_tokens < self.max_num_seqs:
            yield Fault(
                ("max_batched_tokens",),
                self.max_batched_tokens,
                f"vLLM gives each of the rollout.max_num_seqs = {self.max_num_seqs} sequences a token; must be as many "
                "or more",
            )

    def _exact_faults(self) -> Iterator[Fault]:
        if self.linear_kernels == "vllm":
            yield Fault(
                ("linear_kernels",), "vllm", "rollout.numerics: exact multiplies with qarl's kernels; leave null"
            )
        for name, value in self.vllm.args.items():
            if name not in EXACT_ARGS:
                text = "may change what is computed, and rollout.numerics is exact; leave it out, or use numerics fast"
                yield Fault(("vllm", "args", name), value, text)
