"""Engines that `qarl verify-exact` samples from. They can also trace one sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from qarl_kernels.attention import PAGE

from qarl.config import Config, RolloutConfig
from qarl.config.messages import validated
from qarl.exactness.request import SAMPLES, Round, Sizes
from qarl.inference.opening import Opened
from qarl.policy.trace import Tracer
from qarl.rollout.native.engine import NativeEngine
from qarl.types import Rollout


class Engine(Protocol):
    """An engine to check. preemptions: How often a sequence lost its KV pages and was recomputed; None if unknown."""

    preemptions: int | None

    def sample(self, one: Round) -> list[Rollout]:
        """Return the round's responses, see `RolloutEngine.generate`."""
        ...

    def trace(self, one: Round, tracer: Tracer) -> list[Rollout]:
        """Like `sample`; also reports every operation of the forwards to the tracer."""
        ...

    def close(self) -> None: ...


def tight(sizes: Sizes) -> RolloutConfig:
    """Return engine sizes so small that prompts are split into chunks and sequences are preempted."""
    sequences = min(sizes.sequences, sizes.prompts(sizes.response) * SAMPLES)
    # Prompts are shared, and most prompts and responses are short. So a fifth of the full size causes preemptions.
    pool = max(sizes.longest, sequences * sizes.longest // 5) + PAGE
    return RolloutConfig(
        max_num_seqs=sequences, max_batched_tokens=max(sequences, sizes.prompt // 3), kv_cache_tokens=pool
    )


class Native:
    """The native engine, in the learner's process."""

    def __init__(self, opened: Opened) -> None:
        self._engine: NativeEngine = opened.engine
        self._version = opened.policy.version
        self.preemptions: int | None = 0

    def sample(self, one: Round) -> list[Rollout]:
        rollouts = self._engine.generate(one.prompts, one.sampling, self._version)
        self.preemptions = (self.preemptions or 0) + self._engine.preemptions
        return rollouts

    def trace(self, one: Round, tracer: Tracer) -> list[Rollout]:
        with self._engine.sampler.traced(tracer):
            return self._engine.generate(one.prompts, one.sampling, self._version)

    def close(self) -> None:
        self._engine.close()


class VLLM:
    """vLLM with exact numerics, in the learner's process. place: An empty directory for its files."""

    def __init__(
        self, opened: Opened, sizes: Sizes, rollout: RolloutConfig, place: Path, say: Callable[[str], None]
    ) -> None:
        from qarl.rollout.vllm.engine import VLLMEngine  # needs vLLM
        from qarl.rollout.vllm.launch import require_vllm
        from qarl.weight_sync.canary import canary_of
        from qarl.weight_sync.sender import WeightSender

        policy, tokenizer = opened.policy, opened.tokenizer
        layout, self._version = policy.sampler.layout, policy.version
        config = _config(opened, sizes, rollout)
        require_vllm(config, policy.device, layout.max_length)
        canary = canary_of([[1, 2, 3, 4]], layout.max_length)
        weights = WeightSender(layout, tokenizer, policy.sampler, canary, say, exact=True)
        self._engine = VLLMEngine(config, layout, tokenizer, weights, place, say)
        self._engine.publish(policy.current)
        self.preemptions: int | None = None

    def sample(self, one: Round) -> list[Rollout]:
        return self._engine.generate(one.prompts, one.sampling, self._version)

    def trace(self, one: Round, tracer: Tracer) -> list[Rollout]:
        self._engine.tracer = tracer
        try:
            return self._engine.generate(one.prompts, one.sampling, self._version)
        finally:
            self._engine.tracer = None

    def close(self) -> None:
        self._engine.close()


def _config(opened: Opened, sizes: Sizes, rollout: RolloutConfig) -> Config:
    """Build the configuration that vLLM needs. Raises UserError for options that vLLM does not support exactly."""
    target, layout = opened.target, opened.policy.sampler.layout
    dtype = str(layout.dtype).removeprefix("torch.")
    exact = {"engine": "vllm", "numerics": "exact", "vllm": {"process": "inline", "sleep_level": 0}}
    given = {
        "model": target.model.model_dump() | {"dtype": dtype, "device": layout.device.type},
        "quant": target.quant.model_dump(),
        "rollout": rollout.model_dump() | exact | {"max_response_length": sizes.response},
        "data": {"source": "task:arithmetic", "max_prompt_length": sizes.prompt},
        "reward": {"functions": [{"name": "exact"}]},
        "train": {"steps": 1},
    }
    return validated(Config, given, lambda loc: "--engine vllm")
