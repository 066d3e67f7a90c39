"""Evaluate one policy: generate batches of responses, score them, and save each batch when it is done."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from qarl_kernels.logprob import Truncation

from qarl.config import EvaluationConfig
from qarl.errors import UserError
from qarl.evaluation.results import Row, summarise
from qarl.evaluation.tasks import LoadedTask, TaskRewards
from qarl.rollout.engine import Generates, SamplingParams
from qarl.types import Prompt, Rollout

BATCH_RESPONSES = 128  # responses that are generated and saved together; an interruption loses at most these

Phase = Callable[[str, int], AbstractContextManager[Callable[..., None]]]  # `RunConsole.phase`


@dataclass(frozen=True)
class Settings:
    """Sampling and scoring settings of an evaluation. Lengths are in tokens."""

    samples: int
    pass_at: tuple[int, ...]
    truncation: Truncation
    max_response_length: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    seed: int
    correct_threshold: float

    @classmethod
    def of(
        cls, config: EvaluationConfig, max_response_length: int, stop: Sequence[str], stop_token_ids: frozenset[int]
    ) -> Settings:
        """Settings of an `evaluation` section. The other arguments are fallbacks from the `rollout` section."""
        return cls(
            samples=config.samples,
            pass_at=tuple(sorted(set(config.pass_at or ()))),
            truncation=Truncation(config.temperature, config.top_k, config.top_p, config.min_p),
            max_response_length=config.max_response_length or max_response_length,
            stop=tuple(stop if config.stop is None else config.stop),
            stop_token_ids=stop_token_ids,
            seed=config.seed,
            correct_threshold=config.correct_threshold,
        )

    def sampling(self, task: str) -> SamplingParams:
        """Sampling parameters of one task. Its random streams differ from those of training and of other tasks.

        Policies evaluated with the same seed use the same random numbers, which reduces the noise of their difference.
        """
        digest = hashlib.sha256(f"{self.seed}/{task}".encode()).digest()
        seed = 1 << 63 | int.from_bytes(digest[:8]) >> 1  # training's seeds are below 2**63
        return SamplingParams(
            self.samples, seed, self.max_response_length, self.truncation, self.stop, self.stop_token_ids
        )

    def describe(self) -> dict[str, Any]:
        """JSON values that determine completions and correctness. The reported values of pass@k are not included."""
        return {
            "samples": self.samples,
            **asdict(self.truncation),
            "max_response_length": self.max_response_length,
            "stop": list(self.stop),
            "stop_token_ids": sorted(self.stop_token_ids),
            "seed": self.seed,
            "correct_threshold": self.correct_threshold,
        }


def evaluate(
    engine: Generates,
    version: int,
    tasks: Sequence[LoadedTask],
    settings: Settings,
    rewards: TaskRewards,
    rows: list[Row],
    save: Callable[[list[Row]], None],
    phase: Phase,
    check: Callable[[], None] = lambda: None,
    ranks: int = 1,
) -> dict[str, Any]:
    """Generate and score the completions that `rows` does not have yet.

    A token depends only on the policy and on (seed, task, prompt, sample, position). Therefore batching and
    interruptions do not change results.

    Args:
        engine: The rollout engine.
        version: Policy version in `engine`.
        tasks: The tasks.
        settings: Sampling and scoring settings.
        rewards: Reward functions of the tasks.
        rows: All completions so far, including those of earlier starts.
        save: Called with the completions of each finished batch; appends them to `rows`.
        phase: Called with (name, number of responses); shows progress.
        check: Called between forwards. An exception from it ends the evaluation; finished batches stay in `rows`.
        ranks: Number of ranks that `engine` generates on.

    Returns:
        `summarise` of all completions.

    Raises:
        UserError: `rows` has completions of other prompts.
    """
    wanted = {(task.name, prompt.id): prompt.text for task in tasks for prompt in task.prompts}
    for row in rows:
        if wanted.get((row["task"], row["prompt_id"])) != row["prompt"]:
            raise UserError(
                f"--out: its completions.jsonl holds a completion for prompt {row['prompt_id']} of task "
                f"{row['task']!r}, which is not part of this evaluation; choose another --out"
            )
    done = {(row["task"], row["prompt_id"]) for row in rows}
    for task in tasks:
        left = [prompt for prompt in task.prompts if (task.name, prompt.id) not in done]
        if not left:
            continue
        size = max(1, ranks * BATCH_RESPONSES // settings.samples)
        with phase(f"evaluation {task.name}", len(left) * settings.samples) as advance:
            for start in range(0, len(left), size):
                prompts = left[start : start + size]
                rollouts = engine.generate(prompts, settings.sampling(task.name), version, _progress(advance, check))
                check()
                save(_rows(task, prompts, rollouts, rewards, settings))
    return summarise([task.name for task in tasks], rows, settings.samples, settings.pass_at)


def _progress(advance: Callable[..., None], check: Callable[[], None]) -> Callable[[int, int], None]:
    shown = 0

    def progress(finished: int, tokens: int) -> None:
        nonlocal shown
        check()
        advance(finished - shown)
        shown = finished

    return progress


def _rows(
    task: LoadedTask, prompts: list[Prompt], rollouts: list[Rollout], rewards: TaskRewards, settings: Settings
) -> list[Row]:
    """One row per completion, in the order (prompt, sample)."""
    scores = rewards.score(task, prompts, rollouts)
    threshold = settings.correct_threshold if task.correct_at is None else task.correct_at
    by_id = {prompt.id: prompt for prompt in prompts}
    return [
        {
            "task": task.name,
            "prompt_id": rollout.prompt_id,
            "sample": rollout.sample,
            "prompt": by_id[rollout.prompt_id].text,
            "completion": rollout.text,
            "finish_reason": rollout.finish_reason,
            "tokens": len(rollout.token_ids),
            "reward": scores.total[i],
            "rewards": {label: values[i] for label, values in scores.by_function.items()},
            "correct": scores.total[i] >= threshold,
            "answer": by_id[rollout.prompt_id].columns.get("answer"),
        }
        for i, rollout in enumerate(rollouts)
    ]
