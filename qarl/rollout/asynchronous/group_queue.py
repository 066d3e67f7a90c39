"""The groups in flight, shared between the learner, the sampler's thread and the rewards' thread."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from qarl.rollout.asynchronous.groups import OrderLog, PendingGroup, Wave

POLL_S = 0.05  # seconds between two polls of a waiting learner
CLOSE_S = 5.0  # seconds to wait for a thread when the run ends


class GroupQueue:
    """Groups that samplers work on or have completed, until a step has learned from them.

    Hold the lock of `changed` to access anything but `wait`, `next_to_score`, `run` and `close`.

    Attributes:
        changed: Condition that is notified of every change.
        groups: Groups of all ranks, in the order in which they are learned from.
        taken: Numbers of the groups that the current step learns from.
        log: Orders that a restarted sampler must get.
        to_score: Complete groups of this rank without scores.
        to_cancel: Numbers of groups that the sampler's process must drop.
        cancelled: Number of groups cancelled since `AsyncEngine` last reset it.
        fault: The first exception that a thread raised.
        closing: Whether the threads must end.
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
        """Return the groups that no step has taken, complete or not."""
        return [group for group in self.groups if group.number not in self.taken]

    def usable(self) -> int:
        """Return the number of waiting groups that steps will take; the other waiting groups will be cancelled."""
        sizes = Counter(group.wave for group in self.groups)
        without_wave = sizes.pop(None, 0)
        return without_wave + sum(min(wave.needed, size) for wave, size in sizes.items() if wave) - len(self.taken)

    def remove(self, numbers: set[int]) -> None:
        """Forget the groups with these numbers."""
        self.groups = deque(group for group in self.groups if group.number not in numbers)

    def learned(self) -> None:
        """Forget the groups that a step has taken."""
        for group in self.groups:
            if group.wave is not None and group.number in self.taken:
                group.wave.needed -= 1
        self.remove(self.taken)
        self.taken = set()

    def finish(self, answers: Iterable[list[Any]]) -> int:
        """Store responses that the sampler's process sent, see `NativeHost.step`. Returns their number of tokens."""
        by_number, tokens = {group.number: group for group in self.groups}, 0
        for number, sample, *answer in answers:
            tokens += len(answer[0])
            group = by_number.get(number)
            if group is None or group.cancelled:  # the sampler finished it before it got the order to cancel
                continue
            group.finish(sample, *answer)
            if group.complete:
                self.to_score.append(group)
                self._cancel_rest(group.wave)
        self.log.prune()
        return tokens

    def keep_partials(self, partials: Iterable[Sequence[Any]]) -> None:
        """Store the tokens so far of unfinished responses, see `NativeHost.partials`."""
        by_number = {group.number: group for group in self.groups}
        for number, sample, tokens, logprobs, versions in partials:
            group = by_number.get(number)
            if group is not None and sample not in group.rollouts:  # it may have finished meanwhile
                group.partial[sample] = tokens, logprobs, versions

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
        """Raise the exception of a thread, if there is one."""
        if self.fault is not None:
            raise self.fault

    def wait(self, condition: Callable[[], bool], tick: Callable[[], None] = lambda: None) -> None:
        """Wait until a condition holds, calling `tick` repeatedly. Raises the fault of a thread."""
        while True:
            with self.changed:
                self.raise_fault()
                if condition():
                    return
                self.changed.wait(POLL_S)
            tick()

    def next_to_score(self) -> list[PendingGroup]:
        """Wait for complete groups without scores, and return those of one step; [] once the queue closes."""
        with self.changed:
            while not self.to_score and not self.closing:
                self.changed.wait()
            if self.closing:
                return []
            step = self.to_score[0].step
            groups = [group for group in self.to_score if group.step == step]
            self.to_score = deque(group for group in self.to_score if group.step != step)
            return groups

    def run(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread. Its exception becomes `fault`."""

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
            thread.join(CLOSE_S)  # a reward function may take longer; its worker process is killed next
