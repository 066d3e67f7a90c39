"""Progress and failed rewards of one step, on the console."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qarl.rewards import RewardResult
from qarl.training.console import RunConsole
from qarl.training.observer import Observer, Phase
from qarl.types import Prompt, Rollout

SHOWN: dict[Phase, str] = {"rollout": "rollout", "reward": "rewards", "learner": "learner"}
FAILURES = 3  # failed rewards per step that are printed individually


class StepDisplay(Observer):
    """Observer that shows a running step on `console`."""

    def __init__(self, console: RunConsole) -> None:
        self._console = console
        self._advance: Callable[..., None] | None = None

    @contextmanager
    def phase(self, name: Phase, responses: int | None) -> Iterator[None]:
        if name not in SHOWN:
            yield
            return
        with self._console.phase(SHOWN[name], responses) as self._advance:
            yield

    def progress(self, responses: int) -> None:
        if self._advance is not None:
            self._advance(responses)

    def scored(self, prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult) -> None:
        for message in scores.messages[:FAILURES]:
            self._console.warn(message)
        if len(scores.messages) > FAILURES:
            left = len(scores.messages) - FAILURES
            self._console.warn(f"and {left} more failed rewards in this step; see rewards.log")
