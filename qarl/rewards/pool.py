"""Scores completions in worker processes, with time limits, individual retries, and replacement of dead workers."""

from __future__ import annotations

import select
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from qarl.inputs.code import check_reference
from qarl.rewards.batch import Batch, RewardResult, Share
from qarl.rewards.loader import labels
from qarl.rewards.log import RewardLog
from qarl.rewards.process import LOOK_S, Report, Worker

if TYPE_CHECKING:
    from qarl.config.reward import RewardConfig


class RewardPool:
    """The functions of `reward.functions`, loaded in `reward.workers` processes.

    A function's label is its name, or the part after the colon; a duplicate label gets `#2`.

    Args:
        config: The `reward` section.
        columns: Names of the data columns; functions that need another one are rejected.
        log_path: File for the functions' output (see `RewardLog`). Default: stderr of this process.

    Raises:
        UserError: A function cannot be loaded; see `loader`.
    """

    def __init__(self, config: RewardConfig, columns: Collection[str], log_path: Path | None = None) -> None:
        self._config = config
        self._columns = sorted(columns)
        self._log = RewardLog(log_path)
        for function in config.functions:
            if not function.builtin:
                check_reference(function.name, f"reward.functions: `{function.name}`")
        self.labels = labels([function.name for function in config.functions])
        # Token ids are large, so they are only sent to functions that read them: custom ones, `length` and `overlong`.
        self._reads_tokens = [not f.builtin or f.name in ("length", "overlong") for f in config.functions]
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
        """Call every function on every completion. The pool can be used again after an exception.

        Each function gets the batch in `reward.workers` contiguous chunks, with a time limit of `timeout_s` per chunk.
        If a call raises, hangs, dies or returns an invalid result, the completions of its chunk are retried one by one,
        and those that fail again score 0 and are counted.

        Retries of a function are limited to 6 x `timeout_s` and three loads of the functions, so that a batch takes
        bounded time. After two retries hang, the time limit drops to a tenth of `timeout_s`. Completions left over
        score 0 and are counted.

        A score is invalid if it, or its product with the weight, exceeds 1e9, so that all sums are finite.

        Args:
            completions: Response texts.
            prompts: Their prompts.
            columns: Data columns, one value per completion.
            completion_ids: Token ids of the completions, passed to the functions as a column of this name (as in TRL).
            share: This rank's part of the batch, if several ranks score it.

        Returns:
            The scores.

        Raises:
            UserError: A function failed on more than `max_failed_frac` of the batch (of all ranks, with `share`).
            ValueError: The lists have different lengths.
        """
        assert not self._closed, "score() on a closed RewardPool"
        config, count = self._config, len(completions)
        tokens = {} if completion_ids is None else {"completion_ids": completion_ids}
        for name, values in {"prompts": prompts, **columns, **tokens}.items():
            if len(values) != count:
                raise ValueError(f"{name} has {len(values)} values for {count} completions")
        batch = Batch(completions, prompts, columns, completion_ids, config, self.labels, self._reads_tokens, share)
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
        """Stop the workers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start_worker(self) -> Worker:
        functions = [
            (label, f.name, dict(f.options)) for label, f in zip(self.labels, self._config.functions, strict=True)
        ]
        return Worker(functions, self._columns, self._log, self._config.memory_gib)

    def _replace_gone(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker.gone:
                worker.kill()
                self._workers[index] = self._start_worker()

    def _abandon(self) -> None:
        """Kill workers that have a request in flight; the next `score` replaces them."""
        for worker in self._workers:
            if worker.task or worker.starting:
                worker.kill()

    def _hand_out(self, batch: Batch) -> None:
        for worker in self._workers:
            if not worker.starting and worker.task is None:
                if (scheduled := batch.next_task(time.monotonic())) is None:
                    return
                task, limit_s = scheduled
                worker.send(task, batch.arguments(task), limit_s)

    def _wait_for_reports(self) -> list[Report]:
        """Wait up to LOOK_S for a worker to reply, die or time out; return the tasks that ended."""
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
