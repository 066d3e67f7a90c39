"""Objectives: from log-probs and advantages to a loss. Pure functions of ragged packed tensors (see segments.py).

An objective says what a token is worth (`Surrogate`); a correction multiplies it; an aggregation adds it up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from qarl.objectives.advantages import compute_advantages
from qarl.objectives.aggregate import Aggregation, Totals, aggregate
from qarl.objectives.gspo import gspo
from qarl.objectives.ppo import ClipOptions, grpo
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Stats, add_stats, finish_stats
from qarl.objectives.tbpo import TbpoOptions, tbpo

if TYPE_CHECKING:
    from qarl.correction import CorrectionOptions

__all__ = ["Objective", "Segments", "Totals", "add_stats", "build_objective", "compute_advantages", "finish_stats"]

OBJECTIVES = {"tbpo": tbpo, "grpo": grpo, "gspo": gspo}


class ObjectiveOptions(TbpoOptions, ClipOptions, Protocol):
    """The `objective` section of the configuration."""

    name: str
    aggregation: Aggregation


class Objective(Protocol):
    def __call__(
        self,
        logp: Tensor,  # (T,) learner now, with gradient
        logp_old: Tensor,  # (T,) learner at the rollout's snapshot
        logp_sampler: Tensor,  # (T,) as the sampler reported
        advantages: Tensor,  # (R,)
        segments: Segments,
        totals: Totals,
    ) -> tuple[Tensor, Stats]:
        """(loss, stats) of one micro-batch. Losses of the micro-batches of a minibatch add up to its loss, and
        their stats by `add_stats`; `finish_stats` makes metrics of the sum."""
        ...


def build_objective(objective_cfg: ObjectiveOptions, correction_cfg: CorrectionOptions) -> Objective:
    """The objective that the `objective` and `correction` sections describe."""
    # Not at the top: qarl.correction is built on the ratios and segments of this package.
    from qarl.correction import importance_weights

    surrogate_of = OBJECTIVES[objective_cfg.name]
    corrected = correction_cfg.level != "none"
    assert not (corrected and objective_cfg.name == "tbpo"), "tbpo carries its own mismatch weight"

    def objective(
        logp: Tensor,
        logp_old: Tensor,
        logp_sampler: Tensor,
        advantages: Tensor,
        segments: Segments,
        totals: Totals,
    ) -> tuple[Tensor, Stats]:
        surrogate = surrogate_of(logp, logp_old, logp_sampler, advantages, segments, objective_cfg)
        value, stats = surrogate.value, surrogate.stats
        if corrected:
            correction = importance_weights(logp_old, logp_sampler, segments, correction_cfg)
            value, stats = value * correction.weights, stats | correction.stats
        return -aggregate(value, segments, objective_cfg.aggregation, *totals), stats

    return objective
