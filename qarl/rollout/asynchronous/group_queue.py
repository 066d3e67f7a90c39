"""The groups in flight, which the learner shares with the thread of the sampler and that of the rewards."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from qarl.rollout.asynchronous.groups import OrderLog, PendingGroup, Wave

LOOK_S = 0.05  # between two looks of the learner that waits
CLOSE_S = 5.0  # for a thread, when the run ends


class GroupQueue:
    """Groups that were given to samplers and that no step has learned from.

    Everything but `wait`, `run` and `close` is read, written and called under the lock of `changed`.

    Attributes:
        changed: Is notified of every change.
        groups: Of all ranks, in the order in which they are learned from.
        taken: Numbers of the groups that the current step learns from.
        log: The orders that a new process of the sampler would have to get.
        to_score: Complete groups of this rank without scores.
        to_cancel: Numbers of groups that the sampler's process still has to drop.
        cancelled: Number of groups that were cancelled since the last step.
        fault: What a thread raised.
        closing: Whether the threads have to end.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.groups: deque[PendingGroup] = deque()
        self.taken: set[int] = set()
        self.log = OrderLog()
        self.to_score: deque[PendingGroup] = deque()
        self.to_cancel: list[int] = []
        self.cancelled = 0
        self.fault: BaseException | None = None
        self.closing = False
        self._threads: list[threading.Thread] = []

    def waiting(self) -> list[PendingGroup]:
        """Return the groups that no step has taken."""
        return [group for group in self.groups if group.number not in self.taken]

    def places(self) -> int:
        """Return the number of waiting groups that steps will take; the others will be cancelled."""
        sizes = Counter(group.wave for group in self.groups)
        alone = sizes.pop(None, 0)
        return alone + sum(min(wave.needed, size) for wave, size in sizes.items() if wave) - len(self.taken)

    def remove(self, numbers: set[int]) -> None:
        """Forget groups."""
        self.groups = deque(group for group in self.groups if group.number not in numbers)

    def learned(self) -> None:
        """Forget the groups that a step has taken."""
        for group in self.groups:
            if group.wave is not None and group.number in self.taken:
                group.wave.needed -= 1
        self.remove(self.taken)
        self.taken = set()

    def finish(self, answers: Iterable[list[Any]]) -> int:
        """Keep responses as the sampler's process sends them. Returns the number of their tokens."""
        by_number, tokens = {group.number: group for group in self.groups}, 0
        for number, sample, *answer in answers:
            tokens += len(answer[0])
            group = by_number.get(number)
            if group is None or group.cancelled:  # it ended before the sampler knew
                continue
            group.finish(sample, *answer)
            if group.complete:
                self.to_score.append(group)
                self._cancel_rest(group.wave)
        self.log.prune()
        return tokens

    def _cancel_rest(self, wave: Wave | None) -> None:
        """Cancel the unfinished groups of a wave if enough are complete."""
        members = [group for group in self.groups if group.wave is wave]
        if wave is None or sum(group.complete for group in members) < wave.needed:
            return
        for group in members:
            group.cancelled = not group.complete
        gone = [group.number for group in members if group.cancelled]
        self.remove(set(gone))
        self.to_cancel += gone
        self.cancelled += len(gone)

    def raise_fault(self) -> None:
        """Raise what a thread raised, if one did."""
        if self.fault is not None:
            raise self.fault

    def wait(self, condition: Callable[[], bool], tick: Callable[[], None] = lambda: None) -> None:
        """Wait until a condition holds. Raises the fault of a thread, and whatever `tick` raises."""
        while True:
            with self.changed:
                self.raise_fault()
                if condition():
                    return
                self.changed.wait(LOOK_S)
            tick()

    def run(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread; what it raises becomes the fault."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                with self.changed:
                    self.fault = self.fault or error
                    self.changed.notify_all()

        self._threads.append(threading.Thread(target=guarded, name=f"qarl-{name}", daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """End the threads."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        for thread in self._threads:
            thread.join(CLOSE_S)  # a reward function may take longer; its worker is ended next
