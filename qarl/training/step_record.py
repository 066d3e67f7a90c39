"""Collects the records of a step: metrics, rollouts and diagnostics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from qarl.batch.batch import Batch
from qarl.batch.observer import Observer
from qarl.batch.saved import rollout_tensors
from qarl.diagnostics.crossings import Crossings, crossing_metrics, crossings, predicted_steps, sign_agreement
from qarl.diagnostics.error_tokens import error_examples
from qarl.diagnostics.probe import Probe
from qarl.diagnostics.record import diagnostics_record
from qarl.rewards import RewardResult
from qarl.training.metrics import (
    peak_memory_gib,
    response_metrics,
    reward_metrics,
    token_metrics,
    truncation_bias_bound,
)
from qarl.training.recorder import Recorder
from qarl.training.setup import Run
from qarl.types import Prompt, Rollout
from qarl.utils.threads import one_thread

ERROR_EXAMPLES = 8  # maximum number of error-token examples per step in the diagnostics


@dataclass
class Trace:
    """Content of one step's files; a field is None if its file is not due.

    Attributes:
        rows: Rows of rollouts/NNNNNN.jsonl.
        tensors: Tensors of rollouts/NNNNNN.safetensors.
        diagnose: `diagnose(step, metrics)` returns the content of diagnostics/NNNNNN.json.
    """

    rows: list[dict[str, Any]] | None = None
    tensors: dict[str, Tensor] | None = None
    diagnose: Callable[[int, dict[str, float]], dict[str, Any]] | None = None

    def write(self, step: int, metrics: dict[str, float], recorder: Recorder) -> None:
        """Write the files.

        Args:
            step: Step number, counted from 1.
            metrics: All metrics of the step, as in metrics.jsonl.
            recorder: Writes the files.
        """
        if self.rows is not None:
            recorder.rollouts(step, self.rows, self.tensors)
        if self.diagnose is not None:
            with one_thread():
                record = self.diagnose(step, metrics)
            recorder.diagnostics(step, record)


class StepRecord(Observer):
    """Observer that collects the record of one step. Must come after the probe, whose results it uses.

    Args:
        run: The run.
        probe: Diagnostics of the step.
        rollouts_due: Whether to record rollouts in this step.
        on_learned: Called after the last update with `metrics`, to which later metrics are added.

    Attributes:
        metrics: Metrics as in metrics.jsonl, without those of the clock and the engine.
        trace: None before the learner's last update. On all ranks but the first it has no content.
        rollout_tokens: Number of tokens sampled.
    """

    def __init__(
        self, run: Run, probe: Probe, rollouts_due: bool, on_learned: Callable[[dict[str, float]], None]
    ) -> None:
        self._run, self._probe, self._rollouts_due, self._on_learned = run, probe, rollouts_due, on_learned
        self._before = run.policy.current
        self.metrics: dict[str, float] = {}
        self.trace: Trace | None = None
        self.rollout_tokens = 0

    def sampled(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics

    def scored(self, prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult) -> None:
        self._scored = prompts, rollouts, scores
        self.metrics |= (reward_metrics(scores) if scores.by_function else {}) | response_metrics(rollouts)
        trained = sum(len(rollout.token_ids) for rollout in rollouts)
        self.rollout_tokens = int(self.metrics.get("sampling/tokens", trained))

    def learned(self, batch: Batch, metrics: dict[str, float]) -> None:
        run = self._run
        self.metrics |= metrics
        self._on_learned(self.metrics)
        if not run.learner.ranks.first:
            self.metrics["memory/peak_gib"] = peak_memory_gib(run.policy.device)
            self.trace = Trace()
            return
        if (least := metrics.get("policy/retained_mass_min")) is not None:
            _, rollouts, scores = self._scored
            self.metrics["policy/truncation_bias_bound"] = truncation_bias_bound(rollouts, scores, least)
        crossed = crossings(self._before, run.policy.current)
        if "crossings" in self._probe.due:
            self.metrics |= predicted_steps(run.policy.current, metrics["optim/lr"])
        if self._probe.gradient_signs:
            self.metrics |= sign_agreement(self._before, run.policy.current, self._probe.gradient_signs)
        self.metrics |= ({} if batch.given else token_metrics(batch)) | crossing_metrics(crossed) | self._probe.metrics
        self.metrics["memory/peak_gib"] = peak_memory_gib(run.policy.device)
        self.trace = self._trace_of(batch, crossed)

    def _trace_of(self, batch: Batch, crossed: Crossings) -> Trace:
        """Collect the content of the step's files, after its last update. crossed: Code flips per module."""
        trace, probe, run = Trace(), self._probe, self._run
        prompts, rollouts, scores = self._scored
        if self._rollouts_due:
            trace.rows = rollout_rows(prompts, rollouts, scores, batch)
            versions = None
            if any(version != batch.version for r in rollouts for version in r.versions or [r.version]):
                versions = [r.token_versions for r in rollouts]
            trace.tensors = rollout_tensors(batch, scores.total, versions, [r.prompt_id for r in rollouts])
        if probe.record:
            logp_sampler, decode, config = list(batch.logp_sampler), run.tokenizer.decode, run.learner.config
            trace.diagnose = partial(
                diagnostics_record,
                tokens=probe.tokens(batch),
                layers=crossed if "crossings" in probe.due else None,
                examples=error_examples(batch.own_tokens, logp_sampler, batch.advantages, decode, ERROR_EXAMPLES),
                max_tokens=config.diagnostics.tokens,
                seed=config.train.seed,
                backward=probe.backward,
                routing=run.learner.totals.routing.layers(),
            )
        return trace


def rollout_rows(
    prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult, batch: Batch
) -> list[dict[str, Any]]:
    """Return the rows of rollouts/NNNNNN.jsonl, one per response."""
    by_id = {p.id: p for p in prompts}
    rows = []
    for i, rollout in enumerate(rollouts):
        gap = (batch.logp_old[i] - batch.logp_sampler[i]).abs()
        rows.append(
            {
                "prompt_id": rollout.prompt_id,
                "sample": rollout.sample,
                "version": rollout.version,
                "seed": rollout.seed,
                "prompt": by_id[rollout.prompt_id].text,
                "completion": rollout.text,
                "finish_reason": rollout.finish_reason,
                "reward": scores.total[i],
                "rewards": {label: values[i] for label, values in scores.by_function.items()},
                "advantage": float(batch.advantages[i]),
                "tokens": len(rollout.token_ids),
                "logp_sampler_mean": float(batch.logp_sampler[i].mean()),
                "logp_old_mean": float(batch.logp_old[i].mean()),
                "delta_abs_max": float(gap.max()),
            }
        )
    return rows
