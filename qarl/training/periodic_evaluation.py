"""Evaluate the published policy during a training run, with the run's own rollout engine.

    RUN/evaluations.jsonl          one line per evaluation: values with intervals, seconds
    RUN/evaluations/NNNNNN.jsonl   its completions

The values are also sent to trackers, but not written to metrics.jsonl, so that a run's training record is the same with
and without evaluations.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qarl_kernels.attention import PAGE

from qarl.config import Config
from qarl.distributed.ranks import Ranks, SingleProcess
from qarl.distributed.together import on_first
from qarl.errors import UserError
from qarl.evaluation.records import append_rows, keep_rows, read_rows, to_line
from qarl.evaluation.results import Row, metrics_of
from qarl.evaluation.runner import Settings, evaluate
from qarl.evaluation.tasks import LoadedTask, TaskRewards, load_tasks, require_room
from qarl.report.formatting import interval
from qarl.rollout.engine import Generates, RolloutEngine, SamplingParams
from qarl.rollout.shared import SharedEngine
from qarl.storage.disk import disk_errors, write_in_run
from qarl.storage.names import remove_later, step_name
from qarl.storage.runs import EVALUATIONS, Evaluation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qarl.policy.policy import Policy
    from qarl.terminal.run_console import RunConsole
    from qarl.training.held_out import HeldOut

PLACE = "train.run_dir"
KEY = "evaluation.max_response_length"


def load_training_tasks(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    vocabulary: int | None = None,
    now: datetime | None = None,
) -> list[LoadedTask]:
    """Load the tasks of `config.evaluation`.

    Args:
        config: The run's configuration.
        tokenizer: Tokenizer of the policy.
        context: Context length of the policy in tokens.
        vocabulary: See `build_prompts`.
        now: Time of the run's first start, for chat templates that use the time.

    Raises:
        UserError: A task cannot be read, or a prompt with its response may exceed the context or the KV cache.
    """
    tasks = load_tasks(config.evaluation.tasks, tokenizer, vocabulary, now=now)
    length = config.eval_response_length
    require_room(tasks, length, context, "the context", KEY)
    if config.rollout.kv_cache_tokens is not None:
        room = config.rollout.kv_cache_tokens // PAGE * PAGE
        require_room(tasks, length, room, "the whole pages of rollout.kv_cache_tokens,", KEY)
    return tasks


class TrainingEvaluation:
    """The evaluations of one run. Does nothing if there are neither tasks nor held-out examples.

    Args:
        config: The run's configuration.
        tasks: The loaded tasks.
        rewards: Reward functions of the tasks.
        sampling: Sampling parameters of the rollouts; their stop tokens also end responses here.
        ranks: Ranks of the run; None for a single process. All ranks generate and score, rank 0 writes.
        held_out: Examples of `evaluation.held_out`; None if there are none.
    """

    def __init__(
        self,
        config: Config,
        tasks: list[LoadedTask],
        rewards: TaskRewards,
        sampling: SamplingParams,
        ranks: Ranks | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        self._held_out = held_out
        self._config = config
        self._ranks = ranks or SingleProcess()
        self._tasks = tasks
        self._rewards = rewards
        self._settings = Settings.of(
            config.evaluation, config.rollout.max_response_length, sampling.stop, sampling.stop_token_ids
        )
        self._run_dir: Path | None = None
        self._recorded: list[dict[str, Any]] = []

    def close(self) -> None:
        self._rewards.close()

    def check(self, run_dir: Path, step: int) -> list[str]:
        """Check that the tasks are the same as in the run's earlier evaluations. A collective.

        If they changed, a curve would continue with values for other prompts, answers or rewards. Settings such as
        `samples` may change.

        Args:
            run_dir: The run directory.
            step: Step from which the run resumes; later evaluations are ignored.

        Returns:
            At most one line, which names tasks that cannot be checked because an older qarl did not record their data.

        Raises:
            UserError: A task of the same name had other data.
        """
        return on_first(self._ranks, lambda: self._same_tasks(run_dir / EVALUATIONS, step)) or []

    def _same_tasks(self, path: Path, step: int) -> list[str]:
        rows = [row for row in read_rows(path, Evaluation) if row["step"] <= step] if self._tasks else []
        unknown: list[str] = []
        for row in rows:
            stored = row.get("task_fingerprints", {})
            for index, task in enumerate(self._tasks):
                if stored.get(task.name, task.fingerprint) != task.fingerprint:
                    raise UserError(
                        f"{path}: evaluation task {task.name} had other prompts, answers or reward functions after "
                        f"step {row['step']}; restore them, set evaluation.tasks.{index}.name to a new name, or "
                        "remove the file"
                    )
                if task.name not in stored and any(entry["name"] == task.name for entry in row["tasks"]):
                    unknown.append(task.name)
        names = ", ".join(dict.fromkeys(unknown))
        line = f"{path}: an older qarl did not record the data of task {names}; cannot check that it is unchanged"
        return [line] if unknown else []

    def begin(self, run_dir: Path, step: int) -> None:
        """Remove the evaluations after `step`, from which the run resumes. Raises UserError if that fails."""
        self._run_dir = run_dir
        on_first(self._ranks, lambda: self._forget(run_dir, step))

    def _forget(self, run_dir: Path, step: int) -> None:
        self._recorded = keep_rows(self._path, Evaluation, lambda row: row["step"] <= step, PLACE)
        folder = run_dir / "evaluations"
        with disk_errors(folder, place=PLACE):
            remove_later(folder, ".jsonl", step)

    def due(self, step: int) -> bool:
        """Whether an evaluation is due after `step`."""
        return step <= self._config.train.steps and self._config.evaluation.due(step, self._config.train.steps)

    def at(
        self,
        step: int,
        engine: RolloutEngine,
        policy: Policy,
        console: RunConsole,
        check: Callable[[], None],
        track: Callable[[int, dict[str, float]], None],
    ) -> None:
        """Evaluate the policy after `step`, unless this evaluation is already recorded.

        Args:
            step: The training step.
            engine: The run's rollout engine.
            policy: The policy.
            console: Shows progress.
            check: Raises if a signal was received. Nothing of this evaluation is kept then.
            track: Called with the step and the evaluation's metrics, for the trackers.

        Raises:
            UserError: A reward function fails too often, or a file cannot be written.
        """
        started, ranks = time.perf_counter(), self._ranks
        fingerprint = self._fingerprint(policy) if ranks.first else ""
        recorded = any(row["step"] == step and row.get("fingerprint") == fingerprint for row in self._recorded)
        if ranks.gather(recorded)[0]:
            return
        check()
        rows: list[Row] = []
        generator: Generates = engine
        if ranks.count > 1:
            rollout = self._config.rollout
            generator = SharedEngine(engine, ranks, check, rollout.samplers(ranks.count), rollout.restarts_s)
            check = _no_check
        summary: dict[str, Any] = {"tasks": []}
        if self._tasks:
            summary = evaluate(
                generator,
                policy.version,
                self._tasks,
                self._settings,
                self._rewards,
                rows,
                rows.extend,
                console.phase,
                check,
                ranks.count,
            )
        if self._held_out is not None:
            with console.phase("held-out loss"):
                summary["held_out"] = self._held_out.measure()
        seconds = time.perf_counter() - started
        tasks = {task.name: task.fingerprint for task in self._tasks}
        record = {"step": step, **summary, "time/eval_s": seconds, "fingerprint": fingerprint}
        record["task_fingerprints"] = tasks
        on_first(ranks, lambda: self._write(step, rows, record))
        track(step, metrics_of(summary) | {"time/eval_s": seconds})
        for entry in summary["tasks"]:
            value = interval(**entry["avg"])
            console.message(f"evaluation after step {step}: {entry['name']} avg@{entry['samples']} {value}")
        if "held_out" in summary:
            values = ", ".join(f"{name} {value:.4g}" for name, value in summary["held_out"].items())
            console.message(f"held out after step {step}: {values}")

    def _write(self, step: int, rows: list[Row], record: dict[str, Any]) -> None:
        self._write_completions(step, rows)
        # One evaluation per step: replace one that had other settings, or that an earlier start of a run without steps
        # left behind.
        self._recorded = [*keep_rows(self._path, Evaluation, lambda row: row["step"] != step, PLACE), record]
        append_rows(self._path, [record], PLACE)

    @property
    def _path(self) -> Path:
        assert self._run_dir is not None, "call begin first"
        return self._run_dir / EVALUATIONS

    def _fingerprint(self, policy: Policy) -> str:
        """Return a digest of everything that determines the results, including the policy."""
        content = [
            self._settings.describe(),
            self._settings.pass_at,
            [task.fingerprint for task in self._tasks],
            policy.current.manifest().digest(),
            *([] if self._held_out is None else [self._held_out.fingerprint]),
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def _write_completions(self, step: int, rows: list[dict[str, Any]]) -> None:
        path = self._path.parent / "evaluations" / f"{step_name(step)}.jsonl"
        text = "".join(to_line({"step": step, **row}) for row in rows)
        write_in_run(path, text, PLACE)


def _no_check() -> None:
    """Do nothing. Several ranks poll for signals only at points that all of them reach together."""
