"""Load evaluation tasks: tokenized prompts and the reward functions that score them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qarl.config import EvalTask, RewardConfig, RewardFunction
from qarl.config.evaluation_presets import PRESETS
from qarl.data import build_prompts
from qarl.data.prompts import EMPTY
from qarl.distributed.ranks import Ranks, SingleProcess
from qarl.distributed.together import together
from qarl.errors import UserError
from qarl.rewards import RewardPool, RewardResult
from qarl.rewards.fingerprint import reward_fingerprint
from qarl.rewards.shared import gather_results, score_share
from qarl.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedTask:
    """A task ready to run.

    Attributes:
        dropped: Number of rows dropped because of the task's own `data.max_prompt_length`.
        correct_at: Reward from which a completion is correct: 1 for presets, whose rewards are 0 or 1. None:
            `evaluation.correct_threshold`, which belongs to the rewards of the user's own tasks.
    """

    name: str
    prompts: list[Prompt]
    functions: list[RewardFunction]
    dropped: int = 0
    correct_at: float | None = None

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(len(prompt.token_ids) for prompt in self.prompts)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the scores: prompt tokens, their columns, reward functions."""
        files = [reward_fingerprint([f]) for f in self.functions if not f.builtin]
        prompts = [[p.id, p.token_ids, p.columns] for p in self.prompts]
        content = [self.name, prompts, [f.model_dump() for f in self.functions], files]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def load_tasks(
    tasks: Sequence[EvalTask],
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int | None = None,
    prompting: Mapping[str, Any] | None = None,
    now: datetime | None = None,
) -> list[LoadedTask]:
    """Read the rows of each task and tokenize them.

    A preset keeps all its rows, whatever their length. It keeps only the columns that its reward reads, so that presets
    can share reward workers.

    Args:
        tasks: The tasks.
        tokenizer: Tokenizer of the policy.
        vocabulary: See `build_prompts`.
        prompting: Keys of `data` that override those of every task.
        now: See `build_prompts`.

    Raises:
        UserError: A task cannot be read; the message names it.
    """
    loaded, changes = [], dict(prompting or {})
    if changes.get("chat_template") is False:
        changes.setdefault("chat_template_kwargs", {})
    for task in tasks:
        data = task.dataset.model_copy(update=changes)
        if task.preset is not None:
            data = data.model_copy(update={"max_prompt_length": sys.maxsize})
        with _errors_of(task):
            prompts, report = build_prompts(data, tokenizer, sys.maxsize, 0, vocabulary=vocabulary, now=now)
            if empty := report.reasons[EMPTY]:
                raise UserError(f"{empty} of {report.rows} prompts have no text")
            if task.preset is not None:
                kept = PRESETS[task.preset].reads
                prompts = [replace(p, columns={name: p.columns[name] for name in kept}) for p in prompts]
        correct_at = None if task.preset is None else 1.0
        loaded.append(LoadedTask(str(task.name), prompts, task.functions, report.dropped, correct_at))
    return loaded


def require_room(tasks: Sequence[LoadedTask], max_response_length: int, limit: int, what: str, key: str) -> None:
    """Raise UserError if a prompt and its response can exceed `limit` tokens.

    Args:
        tasks: The tasks.
        max_response_length: Maximum tokens of a response.
        limit: Maximum tokens of a prompt plus its response.
        what: Name of the limit, for the message.
        key: Key or option that sets `max_response_length`, for the message.
    """
    for task in tasks:
        over = sum(len(prompt.token_ids) + max_response_length > limit for prompt in task.prompts)
        if over:
            room = limit - task.longest
            fix = f"set {key} to {room} or less" if room > 0 else "use shorter prompts or another model"
            raise UserError(
                f"evaluation task {task.name}: {over} of {len(task.prompts)} prompts (the longest has {task.longest} "
                f"tokens) with responses of {max_response_length} exceed {what} of {limit} tokens; {fix}"
            )


class TaskRewards:
    """Reward worker pools of the tasks. Tasks with equal functions and columns share a pool.

    Args:
        tasks: The tasks.
        limits: A `reward` section for workers, timeouts and allowed failures; its functions are not used.
        log_path: See `RewardPool`.
        ranks: Ranks that score together; None for a single process.

    Raises:
        UserError: A function cannot be loaded, or a column that it needs is missing.
    """

    def __init__(
        self,
        tasks: Sequence[LoadedTask],
        limits: RewardConfig | None,
        log_path: Path | None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or SingleProcess()
        self._max_failed_frac: dict[str, float] = {}
        self._pools: dict[str, RewardPool] = {}
        self._of_task: dict[str, RewardPool] = {}
        try:
            for task in tasks:
                columns = list(task.prompts[0].columns)
                of_section = limits or RewardConfig(functions=task.functions)
                self._max_failed_frac[task.name] = of_section.max_failed_frac
                key = json.dumps([[f.model_dump() for f in task.functions], sorted(columns)], sort_keys=True)
                if key not in self._pools:
                    config = of_section.model_copy(update={"functions": task.functions})
                    with _errors_of(task):
                        self._pools[key] = RewardPool(config, columns, log_path)
                self._of_task[task.name] = self._pools[key]
        except BaseException:
            self.close()
            raise

    def score(self, task: LoadedTask, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> RewardResult:
        """Score `rollouts`, which are ordered by prompt with the same number for each of `prompts`."""
        ranks, n = self._ranks, len(rollouts) // len(prompts)
        own = ranks.share(len(prompts))

        def scored() -> RewardResult:
            with _errors_of(task):
                mine = rollouts[own.start * n : own.stop * n]
                return score_share(self._of_task[task.name], prompts, mine, ranks)

        place = f"evaluation task {task.name}: "
        return gather_results(together(ranks, scored), ranks, self._max_failed_frac[task.name], place)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@contextmanager
def _errors_of(task: EvalTask | LoadedTask) -> Iterator[None]:
    """Begin the message of a UserError with the name of the task."""
    try:
        yield
    except UserError as error:
        raise UserError(f"evaluation task {task.name}: {error}") from error
