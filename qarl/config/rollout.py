"""How responses are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from qarl.config.base import Fault, Field, Renamed, Section
from qarl.config.limits import (
    IDS,
    ITEMS,
    NAME,
    POOL_TOKENS,
    SAMPLES,
    SEQUENCES,
    SMALLEST_TEMPERATURE,
    TEMPERATURE,
    TOKENS,
    VOCABULARY,
)
from qarl.config.vllm import VLLMConfig


class RolloutConfig(Section):
    """The rollout engine and its sampling parameters."""

    renamed: ClassVar = {"kernels": Renamed("linear_kernels", {"native": "vllm", "qarl": "qarl"})}
    engine: Literal["native", "vllm"] = Field(
        "native",
        description="native: in process, on the policy's own modules and quantized tensors; vllm: vLLM, to which each "
        "version is published.",
    )
    linear_kernels: Literal["vllm", "qarl"] = Field(
        "vllm", description="With engine vllm: vLLM's own linear kernels, or qarl's inside vLLM."
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
    ignore_eos: bool = Field(False, description="Go on after the model's end of sequence (for benchmarks).")
    max_num_seqs: int = Field(64, ge=1, le=SEQUENCES, description="Sequences decoded together.")
    max_batched_tokens: int = Field(
        512, ge=1, le=TOKENS, description="Token budget of one engine step: prefill chunks and decodes together."
    )
    kv_cache_tokens: int | None = Field(
        None,
        ge=1,
        le=POOL_TOKENS,
        description="KV pool size in tokens; default holds max_num_seqs full-length sequences. Sequences are "
        "preempted when it is full.",
    )
    vllm: VLLMConfig = Field(default_factory=VLLMConfig, description="vLLM, where it is the engine.")

    def faults(self) -> Iterator[Fault]:
        if self.linear_kernels == "qarl" and self.engine == "native":
            yield Fault(
                ("linear_kernels",),
                self.linear_kernels,
                "engine native runs qarl's kernels anyway; leave vllm, or use engine vllm",
            )
        if self.engine == "vllm" and self.max_batched_tokens < self.max_num_seqs:
            yield Fault(
                ("max_batched_tokens",),
                self.max_batched_tokens,
                f"vLLM gives each of the rollout.max_num_seqs = {self.max_num_seqs} sequences a token; must be as many "
                "or more",
            )
