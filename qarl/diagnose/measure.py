"""Recompute the metrics of a saved step with the model."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qarl.batch.saved import SavedStep
from qarl.diagnose.policies import RunPolicy
from qarl.diagnostics.crossings import Crossings, crossing_metrics, crossings
from qarl.diagnostics.error_tokens import error_examples, error_token_metrics
from qarl.diagnostics.gradients import gradient_metrics
from qarl.diagnostics.mismatch import log_prob_gap, mismatch_metrics
from qarl.diagnostics.precision import deployed_metrics, precision_metrics
from qarl.diagnostics.record import StepTokens, diagnostics_record
from qarl.errors import UserError
from qarl.objectives.common import TokenLogProbs, finish_stats
from qarl.objectives.objective import build_objective, contribution_stats
from qarl.weight_sync.snapshot import Snapshot

EXAMPLES = 8
Say = Callable[[str], None]


@dataclass(frozen=True)
class Diagnosis:
    """Measurements of one step.

    Attributes:
        step: The training step.
        metrics: Metrics by name, those of metrics.jsonl and those listed by `reading.read`.
        record: Record in the format of diagnostics/NNNNNN.json.
        left_out: One line per measurement that was not possible, with the setting that enables it.
    """

    step: int
    metrics: dict[str, float]
    record: dict[str, Any]
    left_out: list[str]


def diagnose(
    policy: RunPolicy, saved: SavedStep, previous: bool, gradients: bool, history: list[dict[str, Any]], say: Say
) -> Diagnosis:
    """Recompute a step's log-probs with the weights after the step, and measure.

    mismatch/* is computed from the saved log-probs at the rollout's version. Everything else is measured at the
    checkpoint's weights, after all optimizer steps of the step.

    Args:
        policy: The policy of the run.
        saved: The responses of the step.
        previous: The checkpoint of the step before exists, so that the changes of the step can be measured. If it is
            damaged, these measurements are left out with a note.
        gradients: Also run the backward passes for gradients/*.
        history: Rows of metrics.jsonl up to the step.
        say: Called with a line before each slow part.

    Raises:
        UserError: The checkpoint of the step is damaged.
    """
    policy.check_tokens(saved)
    config, segments = policy.config, saved.segments
    say(f"learner and sampler at the weights after step {saved.step}")
    after = policy.load(saved.step)
    shadow = policy.shadow_logprobs(saved)
    logp = shadow if policy.policy.aligned else policy.logprobs(saved)

    objective = build_objective(config.objective, config.correction)
    logps = TokenLogProbs(logp, saved.logp_old, saved.logp_sampler, logp_shadow=shadow)
    log_ratio = objective.log_ratio(logps, segments)
    weights = objective.weights(logps, segments)
    advantages = saved.advantages
    ids = torch.tensor([token for response in saved.own_tokens for token in response])

    metrics = mismatch_metrics(saved.logp_old, saved.logp_sampler, segments)
    metrics |= _inside(saved.logp_old, saved.logp_sampler) | _growth(history)
    ends = torch.isin(ids, torch.tensor(sorted(policy.stop_token_ids), dtype=ids.dtype))
    metrics |= precision_metrics(
        logp, shadow, saved.logp_sampler, log_ratio, advantages, segments, objective.band, ends
    )
    flips = torch.zeros_like(logp) if policy.policy.aligned else policy.argmax_flips(saved).double()
    metrics["precision/argmax_flip_frac"] = float(flips.mean()) if flips.numel() else 0.0
    metrics |= finish_stats(contribution_stats(logps, advantages, segments, objective.pruned(logps, segments)))
    metrics |= weight_metrics(weights)
    metrics |= error_token_metrics(ids, saved.logp_sampler, advantages, segments)
    split, no_gradients = _gradients(policy, saved, gradients, say)
    # Last, because it replaces the policy's weights.
    changes, layers, no_changes = _changes(policy, saved, previous, after, shadow, say)
    metrics |= changes | split

    examples = error_examples(
        saved.own_tokens, saved.logp_sampler.split(saved.lengths), advantages, policy.tokenizer.decode, EXAMPLES
    )
    tokens = StepTokens(
        saved.logp_sampler, saved.logp_old, logp, shadow, log_ratio, weights, advantages, segments, objective.band
    )
    record = diagnostics_record(
        saved.step, metrics, tokens, layers, examples, config.diagnostics.tokens, config.train.seed
    )
    vllm = [
        "vLLM's own arithmetic: the shadow uses qarl's kernels of the same scheme, so alpha includes the difference "
        "between the two"
    ]
    sets = ["the rollout's truncation sets (objective.truncation_set: replay): log-probs use the sets after the step"]
    left_out = [
        *(sets if config.objective.truncation_set == "replay" else []),
        *(vllm if config.rollout.engine == "vllm" else []),
        *no_changes,
        *no_gradients,
    ]
    return Diagnosis(saved.step, metrics, record, left_out)


def weight_metrics(weights: Tensor | None) -> dict[str, float]:
    """Statistics of the correction weights over the tokens; empty without a correction or without tokens.

    weights/mean, weights/max
    weights/ess_frac   effective sample size over the number of tokens, as `mismatch/ess_frac`
    weights/zero_frac  fraction of tokens with weight 0
    """
    if weights is None or not weights.numel():
        return {}
    values = weights.double()
    square = float(values.square().sum())
    return {
        "weights/mean": float(values.mean()),
        "weights/max": float(values.max()),
        "weights/ess_frac": float(values.sum()) ** 2 / (square * values.numel()) if square else 0.0,
        "weights/zero_frac": float((values == 0).double().mean()),
    }


def _gradients(policy: RunPolicy, saved: SavedStep, wanted: bool, say: Say) -> tuple[dict[str, float], list[str]]:
    """gradients/* at the policy's weights, or a line that explains why they were not measured."""
    if not wanted:
        return {}, ["the gradient decomposition (gradients/*): --no-gradients"]
    if not saved.advantages.any():
        return {}, ["the gradient (gradients/*): every advantage of the step is 0"]
    say("backward passes over the step's first minibatch")
    return gradient_metrics(policy.gradient_gram(saved)), []


def _changes(
    policy: RunPolicy, saved: SavedStep, previous: bool, after: Snapshot, shadow: Tensor, say: Say
) -> tuple[dict[str, float], Crossings | None, list[str]]:
    """deployed/*, quant/* and the code flips per layer, or a line that explains why they were not measured.

    Loads the weights before the step into the policy and leaves them there.

    Args:
        policy: The policy of the run.
        saved: The responses of the step.
        previous: The checkpoint of the step before exists.
        after: Published weights after the step.
        shadow: (T,) log-probs of the sampler's arithmetic at `after`.
        say: Called with a line before the slow part.
    """
    what = "changes made by the step (deployed/*, code flips)"
    if not previous:
        fix = "set checkpoint.every: 1 and checkpoint.keep_last: 0 to keep the checkpoint of every step"
        return {}, None, [f"{what}: no checkpoint of step {saved.step - 1}; {fix}"]
    say(f"the sampler's arithmetic at the weights before step {saved.step}")
    try:
        before = policy.load(saved.step - 1)
    except UserError as error:
        return {}, None, [f"{what}: {error}"]
    layers = crossings(before, after)
    deployed = deployed_metrics(policy.shadow_logprobs(saved), shadow, saved.advantages, saved.segments)
    return deployed | crossing_metrics(layers), layers, []


def _inside(logp_old: Tensor, logp_sampler: Tensor) -> dict[str, float]:
    """|delta| of the tokens inside both distributions: mean and maximum, and the means over improbable (tail) and over
    probable tokens (head). Empty groups are left out."""
    delta, infinite = log_prob_gap(logp_old.double(), logp_sampler.double())
    gap, probability = delta.abs()[~infinite], logp_sampler.double().exp()[~infinite]
    parts = {"inside": gap, "tail": gap[probability < 0.1], "head": gap[probability >= 0.9]}
    found = {f"mismatch/{name}_abs_mean": float(part.mean()) for name, part in parts.items() if part.numel()}
    return found | ({"mismatch/inside_abs_max": float(gap.max())} if gap.numel() else {})


def _growth(history: list[dict[str, Any]]) -> dict[str, float]:
    """Mean mismatch/k3 over the first and the last quarter of the run; empty with fewer than eight steps."""
    values = [v for row in history if isinstance(v := row.get("mismatch/k3"), (int, float))]
    quarter = len(values) // 4
    if quarter < 2:
        return {}
    first, last = (statistics.fmean(part) for part in (values[:quarter], values[-quarter:]))
    return {"history/k3_first": first, "history/k3_last": last}
