"""Scores completions in worker processes: a time limit, retries one by one, replacement of what hung or died."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from qarl.errors import UserError
from qarl.rewards.loader import check_reference
from qarl.rewards.process import Task, Worker

if TYPE_CHECKING:
    from types import TracebackType

    from qarl.config.reward import RewardConfig

logger = logging.getLogger("qarl.rewards")


@dataclass(frozen=True)
class RewardResult:
    """Scores of one batch, in its order.

    total: the weighted sum over the functions. by_function: label -> unweighted scores, 0 where the function failed.
    failed: label -> completions it failed on (every label is there). messages: one line a failure.
    """

    total: list[float]
    by_function: dict[str, list[float]]
    failed: dict[str, int]
    messages: list[str]


class RewardPool:
    """The functions of `reward.functions`, loaded in `reward.workers` processes.

    A function's label is its name, or the part after the colon; a second one of the same label gets `#2`.
    columns: the data's column names; given, functions that need another one are refused at once.
    log_path: file that gets what the functions print; default the parent's standard error.

    Raises UserError if a function cannot be loaded; see `loader`.
    """

    def __init__(
        self, config: RewardConfig, columns: Collection[str] | None = None, log_path: Path | None = None
    ) -> None:
        self._config = config
        self._columns = None if columns is None else sorted(columns)
        self._log_path = log_path
        for function in config.functions:
            check_reference(function.name)
        self.labels = _labels([function.name for function in config.functions])
        self._lifeline_read, self._lifeline_write = os.pipe()  # never written; see worker.die_with_parent
        self._closed = False
        self._workers: list[Worker] = []
        try:
            self._workers = [self._start_worker() for _ in range(config.workers)]
            while any(worker.starting for worker in self._workers):
                self._wait_for_reports()
        except BaseException:
            self.close()
            raise

    def score(self, completions: list[str], prompts: list[str], columns: dict[str, list]) -> RewardResult:
        """Call every function on every completion.

        Each function gets the batch in `reward.workers` contiguous chunks, with `timeout_s` seconds for a chunk. A
        chunk whose call raises, hangs, dies or returns nonsense is scored again one completion at a time; those that
        fail alone score 0 and are counted.

        Raises UserError once a function has failed on more than `max_failed_frac` of the batch; ValueError for lists
        of unequal length. The pool can be used again after either.
        """
        assert not self._closed, "score() on a closed RewardPool"
        count = len(completions)
        for name, values in {"prompts": prompts, **columns}.items():
            if len(values) != count:
                raise ValueError(f"{name} has {len(values)} values for {count} completions")
        scores: list[list[float]] = [[0.0] * count for _ in self.labels]
        failed = [0] * len(self.labels)
        messages: list[str] = []

        def note(message: str) -> None:
            logger.warning(message)
            messages.append(message)

        chunk = max(1, -(-count // self._config.workers))
        tasks = deque(
            Task(function, range(start, min(start + chunk, count)))
            for function in range(len(self.labels))
            for start in range(0, count, chunk)
        )
        try:
            self._replace_dead()
            while tasks or any(worker.task for worker in self._workers):
                self._hand_out(tasks, completions, prompts, columns)
                for task, outcome in self._wait_for_reports():
                    label = self.labels[task.function]
                    if isinstance(outcome, list):
                        for index, value in zip(task.indices, outcome, strict=True):
                            scores[task.function][index] = value
                    elif len(task.indices) > 1:
                        note(f"reward `{label}`: {outcome}; scoring its {len(task.indices)} completions one by one")
                        tasks.extendleft(Task(task.function, range(i, i + 1)) for i in reversed(task.indices))
                    else:
                        failed[task.function] += 1
                        note(f"reward `{label}`: completion {task.indices[0]} scores 0: {outcome}")
                        if failed[task.function] > self._config.max_failed_frac * count:
                            raise UserError(
                                f"reward `{label}`: failed on {failed[task.function]} of {count} completions, more "
                                f"than reward.max_failed_frac {self._config.max_failed_frac:g}; the last: {outcome}"
                            )
        except BaseException:
            self._abandon()
            raise
        weights = [function.weight for function in self._config.functions]
        total = [sum(w * s[i] for w, s in zip(weights, scores, strict=True)) for i in range(count)]
        by_label = dict(zip(self.labels, scores, strict=True))
        return RewardResult(total, by_label, dict(zip(self.labels, failed, strict=True)), messages)

    def close(self) -> None:
        """End the workers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.kill()
        os.close(self._lifeline_read)
        os.close(self._lifeline_write)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_worker(self) -> Worker:
        functions = [
            (label, f.name, dict(f.options)) for label, f in zip(self.labels, self._config.functions, strict=True)
        ]
        return Worker(functions, self._columns, self._lifeline_read, self._log_path)

    def _replace(self, worker: Worker) -> None:
        self._workers[self._workers.index(worker)] = self._start_worker()

    def _replace_dead(self) -> None:
        for worker in list(self._workers):
            if not worker.alive:
                worker.kill()
                self._replace(worker)

    def _abandon(self) -> None:
        """Leave no worker with a request or an answer under way: the next `score` replaces those killed here."""
        for worker in self._workers:
            if worker.task or worker.starting:
                worker.kill()

    def _hand_out(self, tasks: deque[Task], completions: list[str], prompts: list[str], columns: dict) -> None:
        for worker in self._workers:
            if tasks and not worker.starting and worker.task is None:
                task = tasks.popleft()
                picked = {name: [values[i] for i in task.indices] for name, values in columns.items()}
                worker.send(
                    task,
                    [completions[i] for i in task.indices],
                    [prompts[i] for i in task.indices],
                    picked,
                    self._config.timeout_s,
                )

    def _wait_for_reports(self) -> list[tuple[Task, list[float] | str]]:
        """Block until a worker reports, dies or runs out of time. Finished tasks, with scores or what went wrong."""
        busy = [worker for worker in self._workers if worker.starting or worker.task]
        deadline = min(worker.deadline for worker in busy)
        ready = wait([worker.connection for worker in busy], timeout=max(0.0, deadline - time.monotonic()))
        finished = []
        for worker in busy:
            if worker.connection in ready:
                report = worker.receive()
            elif time.monotonic() >= worker.deadline:
                report = worker.time_out()
            else:
                continue
            if report is not None:
                finished.append(report)
            if not worker.alive:
                self._replace(worker)
        return finished


def _labels(names: list[str]) -> list[str]:
    labels: list[str] = []
    for name in names:
        base = name.rpartition(":")[2]
        label, copy = base, 1
        while label in labels:
            copy += 1
            label = f"{base}#{copy}"
        labels.append(label)
    return labels
