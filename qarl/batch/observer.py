"""Observers of an RL step: display, clock, signals, diagnostics, records."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

from qarl.batch.batch import Batch, Part
from qarl.objectives.common import TokenLogProbs
from qarl.rewards import RewardResult
from qarl.types import Prompt, Rollout

Phase = Literal["rollout", "reward", "gather", "learner", "publish"]  # gather: only with several ranks


class Observer:
    """Hooks called during a step. All of them do nothing by default.

    An observer must not change what the step computes: a run has the same bits with and without it. If a hook raises,
    the step ends.
    """

    def phase(self, name: Phase, responses: int | None) -> AbstractContextManager[None]:
        """Return a context manager for a phase.

        Args:
            name: Name of the phase.
            responses: Total number of responses that `progress` will report, if it reports any.
        """
        return nullcontext()

    def progress(self, responses: int) -> None:
        """Called when more responses of the phase are done; 0 only shows that the phase is alive."""

    def sampled(self, metrics: dict[str, float]) -> None:
        """Called before `scored` with the metrics of dynamic sampling, if enabled."""

    def scored(self, prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult) -> None:
        """Called after sampling and scoring, with n rollouts per prompt, in order."""

    def begin(self, batch: Batch) -> None:
        """Called before the learner's first forward, at the rollout's weights."""

    def minibatch(self, minibatch: Part) -> None:
        """Called before the forwards of an optimizer step on these responses."""

    def forward(self, part: Part, logps: TokenLogProbs) -> None:
        """Called after a training forward over `part`, a micro-batch of the latest `minibatch`."""

    def update(self, grad_norm: float) -> None:
        """Called after an optimizer step, or after skipping one because the norm is not finite."""

    def learned(self, batch: Batch, metrics: dict[str, float]) -> None:
        """Called after the last optimizer step; see `Learner.metrics` for the metrics."""


class Observers(Observer):
    """Calls several observers in order. `seconds` accumulates the time of their hooks per phase."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._phase: Phase | None = None
        self.seconds: defaultdict[Phase | None, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: Phase, responses: int | None = None) -> Iterator[None]:
        with ExitStack() as entered:
            for observer in self._observers:
                entered.enter_context(observer.phase(name, responses))
            self._phase = name
            yield
            self._phase = None

    def progress(self, responses: int) -> None:
        self._call(lambda observer: observer.progress(responses))

    def sampled(self, metrics: dict[str, float]) -> None:
        self._call(lambda observer: observer.sampled(metrics))

    def scored(self, prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult) -> None:
        self._call(lambda observer: observer.scored(prompts, rollouts, scores))

    def begin(self, batch: Batch) -> None:
        self._call(lambda observer: observer.begin(batch))

    def minibatch(self, minibatch: Part) -> None:
        self._call(lambda observer: observer.minibatch(minibatch))

    def forward(self, part: Part, logps: TokenLogProbs) -> None:
        self._call(lambda observer: observer.forward(part, logps))

    def update(self, grad_norm: float) -> None:
        self._call(lambda observer: observer.update(grad_norm))

    def learned(self, batch: Batch, metrics: dict[str, float]) -> None:
        self._call(lambda observer: observer.learned(batch, metrics))

    def _call(self, hook: Callable[[Observer], Any]) -> None:
        begin = time.perf_counter()
        try:
            for observer in self._observers:
                hook(observer)
        finally:
            self.seconds[self._phase] += time.perf_counter() - begin
