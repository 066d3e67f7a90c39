"""Scores completions in worker processes: a time limit, retries one by one, replacement of what hung or died."""

from __future__ import annotations

import select
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from qarl.rewards.batch import Batch, RewardResult, Share
from qarl.rewards.builtin import BUILTINS
from qarl.rewards.loader import check_reference, labels
from qarl.rewards.log import RewardLog
from qarl.rewards.process import LOOK_S, Report, Worker

if TYPE_CHECKING:
    from types import TracebackType

    from qarl.config.reward import RewardConfig


class RewardPool:
    """The functions of `reward.functions`, loaded in `reward.workers` processes.

    A function's label is its name, or the part after the colon; a second one of the same label gets `#2`.
    columns: the data's column names; given, functions that need another one are refused at once.
    log_path: file that gets what the functions print (see `RewardLog`); default the parent's standard error.

    Raises UserError if a function cannot be loaded; see `loader`.
    """

    def __init__(
        self, config: RewardConfig, columns: Collection[str] | None = None, log_path: Path | None = None
    ) -> None:
        self._config = config
        self._columns = None if columns is None else sorted(columns)
        self._log = RewardLog(log_path)
        for function in config.functions:
            check_reference(function.name)
        self.labels = labels([function.name for function in config.functions])
        # A built-in's columns are known, and token ids are many; `length` and `overlong` read them.
        self._reads_tokens = [f.name not in BUILTINS or f.name in ("length", "overlong") for f in config.functions]
        self._closed = False
        self._load_s = 0.0
        self._workers: list[Worker] = []
        try:
            for _ in range(config.workers if config.functions else 0):
                self._workers.append(self._start_worker())
            while any(worker.starting for worker in self._workers):
                self._wait_for_reports()
        except BaseException:
            self.close()
            raise

    def score(
        self,
        completions: list[str],
        prompts: list[str],
        columns: dict[str, list],
        completion_ids: list[list[int]] | None = None,
        share: Share | None = None,
    ) -> RewardResult:
        """Call every function on every completion.

        columns: the data's, one value a completion. completion_ids: token ids of the completions, which the functions
        get as they get a column of this name (as TRL's do). share: where other ranks score the rest of the batch.

        Each function gets the batch in `reward.workers` contiguous chunks, with `timeout_s` seconds for a chunk. A
        chunk whose call raises, hangs, dies or returns nonsense is scored again one completion at a time; those that
        fail alone score 0 and are counted. A function's retries share 6 x `timeout_s` and three loadings, so that a
        batch takes a bounded time; once two of them hung, the others have a tenth of `timeout_s` each. What is left
        then scores 0 and is counted.
        A score is nonsense, too, where it or its product with the weight is beyond 1e9, so that every sum is finite.

        Raises UserError once a function has failed on more than `max_failed_frac` of the batch, that of all ranks where
        this is a share; ValueError for lists of unequal length. The pool can be used again after either.
        """
        assert not self._closed, "score() on a closed RewardPool"
        config, count = self._config, len(completions)
        tokens = {} if completion_ids is None else {"completion_ids": completion_ids}
        for name, values in {"prompts": prompts, **columns, **tokens}.items():
            if len(values) != count:
                raise ValueError(f"{name} has {len(values)} values for {count} completions")
        weights = [function.weight for function in config.functions]
        batch = Batch(
            completions,
            prompts,
            columns,
            completion_ids,
            self.labels,
            weights,
            self._reads_tokens,
            config.workers,
            config.timeout_s,
            config.max_failed_frac,
            share,
        )
        try:
            self._replace_gone()
            while batch.left or any(worker.task for worker in self._workers):
                self._hand_out(batch)
                if any(worker.starting or worker.task for worker in self._workers):
                    for report in self._wait_for_reports():
                        batch.take(report, time.monotonic(), self._load_s)
        except BaseException:
            self._abandon()
            raise
        return batch.result()

    def close(self) -> None:
        """End the workers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.kill()

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
        return Worker(functions, self._columns, self._log, self._config.memory_gib)

    def _replace_gone(self) -> None:
        for place, worker in enumerate(self._workers):
            if worker.gone:
                worker.kill()
                self._workers[place] = self._start_worker()

    def _abandon(self) -> None:
        """Leave no worker with a request or an answer under way: the next `score` replaces those killed here."""
        for worker in self._workers:
            if worker.task or worker.starting:
                worker.kill()

    def _hand_out(self, batch: Batch) -> None:
        for worker in self._workers:
            if not worker.starting and worker.task is None:
                if (asked := batch.next_task(time.monotonic())) is None:
                    return
                task, limit_s = asked
                worker.send(task, batch.arguments(task), limit_s)

    def _wait_for_reports(self) -> list[Report]:
        """Block until a worker has something to say, dies or runs out of time, LOOK_S at most. What ended meanwhile."""
        busy = [worker for worker in self._workers if worker.starting or worker.task]
        poll = select.poll()
        for worker in busy:
            worker.watch(poll)
        wait_s = min([LOOK_S, *(worker.deadline - time.monotonic() for worker in busy)])
        poll.poll(max(0.0, wait_s) * 1000)
        reports = []
        for worker in busy:
            was_starting = worker.starting
            report = worker.attend()
            if report is not None:
                reports.append(report)
            if was_starting and not worker.starting:
                self._load_s = max(self._load_s, worker.load_s)
        self._replace_gone()
        return reports
