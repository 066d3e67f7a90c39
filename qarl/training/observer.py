"""What may watch an RL step from beside it: display, clock, signals, diagnostics, records."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

from qarl.objectives import TokenLogProbs
from qarl.rewards import RewardResult
from qarl.training.batch import Batch, Part
from qarl.types import Prompt, Rollout

Phase = Literal["rollout", "reward", "gather", "learner", "publish"]  # gather: where there are several ranks


class Observer:
    """Is told of a step as it goes; each of the hooks does nothing unless it is overridden.

    An observer changes nothing that the step computes: a run has the same bits with and without it. What a hook raises
    ends the step there.
    """

    def phase(self, name: Phase, responses: int | None) -> AbstractContextManager[None]:
        """Is entered around a phase. responses: that `progress` will have reported at its end, where it reports any."""
        return nullcontext()

    def progress(self, responses: int) -> None:
        """So many more responses of the phase are done; 0: it goes on."""

    def scored(self, prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult) -> None:
        """After sampling and scoring. rollouts: n for each prompt, in order."""

    def begin(self, batch: Batch) -> None:
        """Before the first optimizer step: the policy is the rollout's snapshot."""

    def minibatch(self, minibatch: Part) -> None:
        """Before an optimizer step on these responses."""

    def forward(self, part: Part, logps: TokenLogProbs) -> None:
        """After a training forward over `part`, a micro-batch of the last `minibatch`."""

    def update(self, grad_norm: float) -> None:
        """After an optimizer step, taken or, for a norm that is not finite, skipped."""

    def learned(self, batch: Batch, metrics: dict[str, float]) -> None:
        """After the last optimizer step. metrics: of the learner, see `Learner.metrics`."""


class Observers(Observer):
    """Several observers as one, told in their order. seconds: what their hooks took in each phase."""

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
        self._tell(lambda observer: observer.progress(responses))

    def scored(self, prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult) -> None:
        self._tell(lambda observer: observer.scored(prompts, rollouts, scores))

    def begin(self, batch: Batch) -> None:
        self._tell(lambda observer: observer.begin(batch))

    def minibatch(self, minibatch: Part) -> None:
        self._tell(lambda observer: observer.minibatch(minibatch))

    def forward(self, part: Part, logps: TokenLogProbs) -> None:
        self._tell(lambda observer: observer.forward(part, logps))

    def update(self, grad_norm: float) -> None:
        self._tell(lambda observer: observer.update(grad_norm))

    def learned(self, batch: Batch, metrics: dict[str, float]) -> None:
        self._tell(lambda observer: observer.learned(batch, metrics))

    def _tell(self, what: Callable[[Observer], Any]) -> None:
        begin = time.perf_counter()
        try:
            for observer in self._observers:
                what(observer)
        finally:
            self.seconds[self._phase] += time.perf_counter() - begin
