"""State of a batch while workers score it: pending tasks, retries and results."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qarl.errors import UserError
from qarl.rewards.frames import pack
from qarl.rewards.process import Report, Task
from qarl.rewards.worker import SCORE_LIMIT

if TYPE_CHECKING:
    from qarl.config.reward import RewardConfig

logger = logging.getLogger("qarl.rewards")

# Limits on scoring the completions of failed chunks one by one: 512 completions of 10 s each would take over an hour.
RETRY_TIMEOUTS = 6  # multiple of timeout_s, wall time
RETRY_LOADS = 3  # plus the time to load the functions this many times, because a call that hangs costs its worker
PATIENCE = 2  # after this many hangs of timeout_s, the time limit per completion drops to IMPATIENT
IMPATIENT = 0.1  # multiple of timeout_s


@dataclass(frozen=True)
class RewardResult:
    """Scores of one batch, in its order.

    Attributes:
        total: Weighted sum over the functions that scored the completion; 0 if all of them skipped it (as in TRL).
        by_function: Label -> unweighted scores: 0 if the function failed, None if it skipped the completion.
        failed: Label -> number of completions that the function failed on. Has every label.
        messages: One line per failure, and one if all functions skipped a completion.
    """

    total: list[float]
    by_function: dict[str, list[float | None]]
    failed: dict[str, int]
    messages: list[str]

    @property
    def skipped(self) -> dict[str, int]:
        """Label -> number of completions for which the function returned None. Has every label."""
        return {label: scores.count(None) for label, scores in self.by_function.items()}

    @classmethod
    def joined(cls, parts: Sequence[RewardResult]) -> RewardResult:
        """Concatenate the results of one or more batches with the same functions."""
        labels = parts[0].by_function
        return cls(
            [score for part in parts for score in part.total],
            {label: [score for part in parts for score in part.by_function[label]] for label in labels},
            {label: sum(part.failed[label] for part in parts) for label in labels},
            [message for part in parts for message in part.messages],
        )

    def part(self, rows: slice, first: bool) -> RewardResult:
        """Select completions. Failures and messages of the whole batch go to the `first` part."""
        return RewardResult(
            self.total[rows],
            {label: scores[rows] for label, scores in self.by_function.items()},
            {label: count if first else 0 for label, count in self.failed.items()},
            self.messages if first else [],
        )


@dataclass(frozen=True)
class Share:
    """This rank's part of a batch that several ranks score.

    Attributes:
        first: Index of its first completion in the batch.
        total: Number of completions in the batch.
    """

    first: int
    total: int


@dataclass
class _Retries:
    """Retries of one function.

    Attributes:
        until: `time.monotonic()` after which no more completions are retried; None before the first retry.
        hangs: Number of retries that timed out.
    """

    until: float | None = None
    hangs: int = 0


class Batch:
    """Completions of one `RewardPool.score` call, in `reward.workers` contiguous chunks per function.

    The caller checks that all lists have the same length.

    Args:
        completions, prompts, columns, completion_ids: See `RewardPool.score`.
        config: The `reward` section.
        labels: Labels of its functions.
        reads_tokens: Whether each function gets `completion_ids` as a column.
        share: This rank's part of a larger batch. Default: the completions are the whole batch.
    """

    def __init__(
        self,
        completions: list[str],
        prompts: list[str],
        columns: dict[str, list],
        completion_ids: list[list[int]] | None,
        config: RewardConfig,
        labels: Sequence[str],
        reads_tokens: Sequence[bool],
        share: Share | None = None,
    ) -> None:
        self._completions, self._prompts, self._columns = completions, prompts, columns
        self._completion_ids = completion_ids
        self._labels, self._reads_tokens = labels, reads_tokens
        self._weights = [function.weight for function in config.functions]
        self._timeout_s, self._max_failed_frac = config.timeout_s, config.max_failed_frac
        count = len(completions)
        self._share = share or Share(0, count)
        self._scores: list[list[float | None]] = [[0.0] * count for _ in labels]
        self._failed = [0] * len(labels)
        self._messages: list[str] = []
        self._retries = [_Retries() for _ in labels]
        chunk = max(1, -(-count // config.workers))
        self._waiting = deque(
            Task(function, range(start, min(start + chunk, count)))
            for function in range(len(labels))
            for start in range(0, count, chunk)
        )
        self._retried: deque[Task] = deque()  # retries of one completion each; scheduled before pending chunks

    @property
    def left(self) -> bool:
        return bool(self._waiting or self._retried)

    def next_task(self, now: float) -> tuple[Task, float] | None:
        """Return the next task and its time limit in seconds, or None if there is none.

        Args:
            now: `time.monotonic()`.
        """
        while self._retried:
            task = self._retried.popleft()
            retries = self._retries[task.function]
            assert retries.until is not None, "a retry has a deadline"
            if now < retries.until:
                limit_s = self._timeout_s if retries.hangs < PATIENCE else IMPATIENT * self._timeout_s
                return task, min(limit_s, retries.until - now)
            self._give_up(task, "the time for retries is used up; see reward.timeout_s")
        return (self._waiting.popleft(), self._timeout_s) if self._waiting else None

    def arguments(self, task: Task) -> dict[str, Any]:
        """Return the packed arguments of a task's function call."""
        picked = {name: [pack(values[i]) for i in task.indices] for name, values in self._columns.items()}
        if self._completion_ids is not None and self._reads_tokens[task.function]:
            picked["completion_ids"] = [list(self._completion_ids[i]) for i in task.indices]
        return {
            "completions": [self._completions[i] for i in task.indices],
            "prompts": [self._prompts[i] for i in task.indices],
            "columns": picked,
        }

    def take(self, report: Report, now: float, load_s: float) -> None:
        """Store the scores of a task, or schedule the completions of a failed chunk for individual retries.

        Args:
            report: How the task ended.
            now: `time.monotonic()`.
            load_s: Time in seconds that a worker takes to load the functions.

        Raises:
            UserError: The function has failed on more than `max_failed_frac` of the batch.
        """
        task, outcome, label = report.task, report.outcome, self._labels[report.task.function]
        if report.stale:
            self._note(
                f"reward `{label}`: dropped {report.stale} replies that did not belong to this call (does it fork?)"
            )
        if isinstance(outcome, list):
            for index, score in zip(task.indices, outcome, strict=True):
                self._keep(task.function, index, score)
            return
        retries = self._retries[task.function]
        if len(task.indices) == 1:
            if report.hung and retries.hangs >= PATIENCE:
                outcome += f"; after {PATIENCE} such calls the limit per completion is {IMPATIENT:g} x reward.timeout_s"
            retries.hangs += report.hung and retries.until is not None
            self._fail(task.function, 1, f"completion {self._number(task.indices[0])} scores 0: {outcome}", outcome)
            return
        self._note(f"reward `{label}`: {outcome}; scoring its {len(task.indices)} completions one by one")
        if retries.until is None:
            retries.until = now + RETRY_TIMEOUTS * self._timeout_s + RETRY_LOADS * load_s
        self._retried.extend(Task(task.function, range(i, i + 1)) for i in task.indices)

    def result(self) -> RewardResult:
        unscored = [i for i, row in enumerate(zip(*self._scores, strict=True)) if all(s is None for s in row)]
        if unscored:
            first = self._number(unscored[0])
            text = f"every reward function returned None for {len(unscored)} completions, which score 0; the first is"
            self._note(f"{text} completion {first}")
        total = [self._total(i) for i in range(len(self._completions))]
        scores = dict(zip(self._labels, self._scores, strict=True))
        return RewardResult(total, scores, dict(zip(self._labels, self._failed, strict=True)), self._messages)

    def _total(self, index: int) -> float:
        scored = zip(self._weights, (scores[index] for scores in self._scores), strict=True)
        return sum((weight * score for weight, score in scored if score is not None), 0.0)

    def _keep(self, function: int, index: int, score: float | None) -> None:
        if score is None:
            self._scores[function][index] = None
            return
        weighted = self._weights[function] * score
        if abs(weighted) <= SCORE_LIMIT:
            self._scores[function][index] = score
            return
        why = f"{score:g} times its weight {self._weights[function]:g} exceeds the limit of {SCORE_LIMIT:.0e}"
        self._fail(function, 1, f"completion {self._number(index)} scores 0: {why}", why)

    def _give_up(self, task: Task, why: str) -> None:
        """Score 0 for `task` and all pending retries of its function."""
        left = [other for other in self._retried if other.function != task.function]
        count = 1 + len(self._retried) - len(left)
        self._retried = deque(left)
        self._fail(task.function, count, f"{count} completions of failed calls score 0: {why}", why)

    def _fail(self, function: int, count: int, message: str, why: str) -> None:
        label = self._labels[function]
        self._failed[function] += count
        self._note(f"reward `{label}`: {message}")
        require_few_failures(label, self._failed[function], self._share.total, self._max_failed_frac, why)

    def _number(self, index: int) -> int:
        """Return the index of a completion in the batch of all ranks, from 0."""
        return self._share.first + index

    def _note(self, message: str) -> None:
        logger.warning(message)
        self._messages.append(message)


def require_few_failures(
    label: str, failed: int, total: int, max_failed_frac: float, last: str, place: str = ""
) -> None:
    """Check that a function has not failed too often.

    Args:
        label: Label of the function.
        failed: Number of completions it failed on.
        total: Number of completions.
        max_failed_frac: Largest allowed fraction.
        last: Reason of the last failure.
        place: Prefix of the error.

    Raises:
        UserError: `failed` exceeds the fraction.
    """
    if failed > max_failed_frac * total:
        raise UserError(
            f"{place}reward `{label}`: failed on {failed} of {total} completions, more than "
            f"reward.max_failed_frac {max_failed_frac:g}; last failure: {last}"
        )
