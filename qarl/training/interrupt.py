"""SIGINT, SIGTERM and SIGHUP: stop at the next safe point with a checkpoint; a second SIGINT stops immediately."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from qarl.batch.batch import Part
from qarl.batch.observer import Observer, Phase
from qarl.distributed.ranks import Ranks, SingleProcess
from qarl.rewards import RewardResult
from qarl.types import Prompt, Rollout
from qarl.utils.signals import Interrupted, StoppedAtOnce, stop_signals


class InterruptGuard:
    """Context manager that turns stop signals (`qarl.utils.signals.stop_signals`) into exceptions.

    Initially a signal raises `Interrupted` immediately, because there is nothing to save. After `defer` the first
    signal is only recorded: `check` raises `Interrupted` at a safe point, and a second SIGINT raises `StoppedAtOnce`
    immediately. Python delivers signals only to the main thread; in other threads the guard does nothing.

    Args:
        say: Prints one line; called at the first signal after `defer`.
        ranks: Ranks of the run; a signal to one rank stops all of them. Default: a single process.
    """

    def __init__(self, say: Callable[[str], None], ranks: Ranks | None = None) -> None:
        self.say = say
        self.ranks = ranks or SingleProcess()
        self.signum: int | None = None
        self._deferred = False
        self._previous: dict[int, Any] = {}  # handlers to restore, as returned by `signal.signal`

    def __enter__(self) -> InterruptGuard:
        main = threading.current_thread() is threading.main_thread()
        for signum in stop_signals() if main else ():
            self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def defer(self) -> None:
        """From now on, stop only at `check`: the run has state to save."""
        self._deferred = True

    def _on_signal(self, signum: int, frame: object) -> None:
        if self.signum is not None:
            if signum == signal.SIGINT:
                raise StoppedAtOnce
            return
        self.signum = signum
        if not self._deferred:
            raise Interrupted(signum)
        with suppress(RuntimeError):  # the signal interrupted a write to the same stream
            self.say(f"{signal.Signals(signum).name}: stopping at the next safe point; Ctrl-C stops now without saving")

    def check(self) -> None:
        """Stop the run if any rank has received a signal. A collective. After `defer` only this method stops a run.

        Raises:
            Interrupted: A rank has received a signal.
        """
        signum = self.ranks.signal(self.signum)
        if signum is not None:
            raise Interrupted(signum)


class SafePoints(Observer):
    """Checks for signals at the points of a step where only the position in the data has changed.

    In a single process these are all points before the first update. With several ranks they are the points that all
    ranks reach: before sampling, after scoring, and before the first minibatch.
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
        if not self._updated and self._guard.ranks.count == 1:  # other ranks may not reach this point
            self._guard.check()

    def minibatch(self, minibatch: Part) -> None:
        if not self._updated:
            self._guard.check()

    def update(self, grad_norm: float) -> None:
        self._updated = True
