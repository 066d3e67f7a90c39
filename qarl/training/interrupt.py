"""SIGINT, SIGTERM and SIGHUP: stop at the next safe point with a checkpoint; a second SIGINT stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from qarl.distributed.ranks import Ranks, SingleProcess
from qarl.rewards import RewardResult
from qarl.training.batch import Part
from qarl.training.observer import Observer, Phase
from qarl.types import Prompt, Rollout
from qarl.utils.signals import Interrupted, StoppedAtOnce, stop_signals


class InterruptGuard:
    """Turns stop signals (`qarl.utils.signals.stop_signals`) into exceptions while it is entered.

    At first a signal raises `Interrupted` immediately, because there is nothing to save yet. After `defer` the first
    signal is only recorded: `check` raises `Interrupted` where stopping is safe, and a second SIGINT raises
    `StoppedAtOnce` immediately. Python delivers signals to the main thread only; in any other thread this does nothing.

    Args:
        say: Called with one line at the first signal after `defer`.
        ranks: The ranks of the run; a signal to one rank stops all of them. None for a single process.
    """

    def __init__(self, say: Callable[[str], None], ranks: Ranks | None = None) -> None:
        self.say = say
        self.ranks = ranks or SingleProcess()
        self.signum: int | None = None
        self._deferred = False
        self._previous: dict[int, Any] = {}  # as `signal.signal` gave them

    def __enter__(self) -> InterruptGuard:
        main = threading.current_thread() is threading.main_thread()
        for signum in stop_signals() if main else ():
            self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def defer(self) -> None:
        """From now on the run has something to lose: stop at `check` only."""
        self._deferred = True

    def _note(self, signum: int, frame: object) -> None:
        if self.signum is not None:
            if signum == signal.SIGINT:
                raise StoppedAtOnce
            return
        self.signum = signum
        if not self._deferred:
            raise Interrupted(signum)
        with suppress(RuntimeError):  # the signal came in the middle of a write to the same stream
            self.say(f"{signal.Signals(signum).name}: stopping at the next safe point; Ctrl-C stops at once, unsaved")

    def check(self) -> None:
        """Raise `Interrupted` if any rank received a signal; a collective. Nothing else decides to stop."""
        signum = self.ranks.signal(self.signum)
        if signum is not None:
            raise Interrupted(signum)

    def check_alone(self) -> None:
        """`check`, between steps of work that other ranks may have less of: on several ranks it waits for the next."""
        if self.ranks.count == 1:
            self.check()


class SafePoints(Observer):
    """Where a signal may end a step: before its first update, when nothing but the data's position has changed.

    On several ranks that is before sampling, after scoring and before the first minibatches, where all of them are.
    """

    def __init__(self, guard: InterruptGuard) -> None:
        self._guard = guard
        self._updated = False

    @contextmanager
    def phase(self, name: Phase, responses: int | None) -> Iterator[None]:
        if name == "rollout":
            self._guard.check()
        yield

    def scored(self, prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult) -> None:
        self._guard.check()

    def progress(self, responses: int) -> None:
        if not self._updated:
            self._guard.check_alone()

    def minibatch(self, minibatch: Part) -> None:
        if not self._updated:
            self._guard.check()

    def update(self, grad_norm: float) -> None:
        self._updated = True
