"""The engines that a check draws from: what it asks of them beside drawing is a trace of one sequence."""

from __future__ import annotations

from typing import Protocol

from qarl_kernels.attention import PAGE

from qarl.config import RolloutConfig
from qarl.exactness.request import SAMPLES, SEQUENCES_BY_DEVICE, Round, Sizes
from qarl.inference.opening import Opened
from qarl.policy.trace import Tracer
from qarl.rollout.native.engine import NativeEngine
from qarl.types import Rollout


class Engine(Protocol):
    """preemptions: how often a sequence lost its KV pages so far; None where the engine does not say."""

    preemptions: int | None

    def draw(self, one: Round) -> list[Rollout]:
        """`RolloutEngine.generate` of the round."""
        ...

    def trace(self, one: Round, tracer: Tracer) -> list[Rollout]:
        """`draw`, with every operation of its forwards told to the tracer."""
        ...

    def close(self) -> None: ...


def tight(sizes: Sizes, device: str) -> RolloutConfig:
    """Engine sizes at which prompts are cut into chunks, and sequences preempted."""
    sequences = min(SEQUENCES_BY_DEVICE[device], sizes.prompts(sizes.response) * SAMPLES)
    # Prompts are shared, most are far from the longest, and so are responses: a fifth is what several sequences lack.
    pool = max(sizes.longest, sequences * sizes.longest // 5) + PAGE
    return RolloutConfig(
        max_num_seqs=sequences, max_batched_tokens=max(sequences, sizes.prompt // 3), kv_cache_tokens=pool
    )


class Native:
    """The engine of the learner's process."""

    def __init__(self, opened: Opened) -> None:
        self._engine: NativeEngine = opened.engine
        self._version = opened.policy.version
        self.preemptions: int | None = 0

    def draw(self, one: Round) -> list[Rollout]:
        rollouts = self._engine.generate(one.prompts, one.sampling, self._version)
        self.preemptions = (self.preemptions or 0) + self._engine.preemptions
        return rollouts

    def trace(self, one: Round, tracer: Tracer) -> list[Rollout]:
        with self._engine.sampler.traced(tracer):
            return self._engine.generate(one.prompts, one.sampling, self._version)

    def close(self) -> None:
        self._engine.close()
