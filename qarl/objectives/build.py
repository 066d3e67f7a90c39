"""From the `objective` and `correction` sections to the objective they describe."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from qarl.config.objective import CLIPPED_OBJECTIVES, dvp_outside_of
from qarl.objectives.band import Band
from qarl.objectives.gspo import sequence_clipped
from qarl.objectives.objective import Objective, SurrogateOf
from qarl.objectives.ppo import clipped, clipped_weights, detached
from qarl.objectives.proximal import RatioKind
from qarl.objectives.pruning import Pruned
from qarl.objectives.reinforce import reinforce
from qarl.objectives.sapo import sapo
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Surrogate
from qarl.objectives.tbpo import tbpo

if TYPE_CHECKING:
    from qarl.config.correction import CorrectionConfig
    from qarl.config.objective import ObjectiveConfig
    from qarl.correction import Correction

NO_CLIP_EPS = 10.0
"""objective.loss no_clip (TRL precision study, section 10.1): both bounds at this, the lower one below 0, so at 0."""

_OWN_RATIO: dict[str, RatioKind] = {"tbpo": "train", "on_policy": "one", "reinforce": "one", "rloo": "one"}


def build_objective(objective_cfg: ObjectiveConfig, correction_cfg: CorrectionConfig) -> Objective:
    """The objective that the two sections describe. A ratio left null is `train`."""
    band = band_of(objective_cfg)
    detach = objective_cfg.loss in ("detach", "detach_center")
    return Objective(
        surrogate=_surrogate(objective_cfg, band),
        ratio=_OWN_RATIO.get(objective_cfg.name) or objective_cfg.ratio or "train",
        aggregation=objective_cfg.aggregation,
        correction=_correction(objective_cfg, correction_cfg),
        pruning=objective_cfg.dvp_outside or dvp_outside_of(objective_cfg.name, correction_cfg.level),
        band=None if detach else band,
        centered=_weights(objective_cfg, band) if objective_cfg.loss == "detach_center" else None,
        kl_coef=objective_cfg.kl_coef,
        kl_estimator=objective_cfg.kl_estimator or "k3",
        entropy_coef=objective_cfg.entropy_coef,
    )


def band_of(cfg: ObjectiveConfig) -> Band | None:
    """The band of the surrogate's ratio; None for one that has no edge."""
    if cfg.name == "tbpo":
        return Band(
            "sequence",
            high=1.0 + cfg.seq_clip_ratio_high,
            low=1.0 - cfg.neg_seq_clip_ratio_low,
            neg_high=1.0 + cfg.neg_seq_clip_ratio_high,
        )
    if cfg.name in ("gspo", "mis_gspo"):
        return Band("sequence", high=1.0 + cfg.clip_ratio_high, low=1.0 - cfg.clip_ratio_low)
    if cfg.name not in CLIPPED_OBJECTIVES:
        return None
    low, high = (NO_CLIP_EPS, NO_CLIP_EPS) if cfg.loss == "no_clip" else (cfg.clip_ratio_low, cfg.clip_ratio_high)
    return Band(
        "token",
        high=1.0 + high,
        # positive_only: a response of A < 0 has no value to lose
        low=0.0 if cfg.name == "positive_only" else max(1.0 - low, 0.0),
        neg_high=cfg.clip_ratio_c if cfg.name == "dual_clip_grpo" else math.inf,
    )


def _surrogate(cfg: ObjectiveConfig, band: Band | None) -> SurrogateOf:
    def surrogate(
        log_ratio: Tensor, logp: Tensor, advantages: Tensor, segments: Segments, center: float, pruned: Pruned
    ) -> Surrogate:
        if cfg.name == "tbpo":
            return tbpo(log_ratio, logp, advantages, segments, band, pruned)
        if cfg.name in ("gspo", "mis_gspo"):
            return sequence_clipped(log_ratio, logp, advantages, segments, band, pruned)
        if cfg.name == "sapo":
            return sapo(log_ratio, advantages, segments, cfg.sapo_tau_pos, cfg.sapo_tau_neg, pruned)
        if cfg.name in ("reinforce", "rloo"):
            return reinforce(logp, advantages, segments)
        worth = _worth(cfg, advantages)
        if cfg.loss not in ("detach", "detach_center"):
            return clipped(log_ratio, worth, segments, band, pruned)
        result = detached(log_ratio, logp, worth, segments, band, center, pruned)
        if cfg.name != "positive_only":
            return result
        return Surrogate(result.value.masked_fill(segments.expand(advantages < 0), 0.0), result.stats)

    return surrogate


def _worth(cfg: ObjectiveConfig, advantages: Tensor) -> Tensor:
    """The advantages that count: positive_only drops the value of punished responses, which stay in denominators."""
    return advantages.clamp(min=0) if cfg.name == "positive_only" else advantages


def _weights(cfg: ObjectiveConfig, band: Band) -> Callable[[Tensor, Tensor, Segments, Pruned], Tensor]:
    def weights(log_ratio: Tensor, advantages: Tensor, segments: Segments, pruned: Pruned) -> Tensor:
        return clipped_weights(log_ratio, _worth(cfg, advantages), segments, band, pruned).value

    return weights


def _correction(objective: ObjectiveConfig, cfg: CorrectionConfig) -> Correction:
    """The configured correction, with the mismatch weight of tbpo and the rejection of mis_gspo."""
    # Not at the top: qarl.correction is built on the ratios and segments of this package.
    from qarl.correction import Correction, Rejection, Weighting

    rejections = tuple(Rejection(r.estimator, r.signal, r.aggregate, r.lower, r.upper) for r in cfg.reject or ())
    weighting = None
    if cfg.level != "none":
        weighting = Weighting(cfg.level, cfg.mode, cfg.lower, cfg.upper, cfg.signal)
    if objective.name == "tbpo":
        assert weighting is None, "tbpo carries its own mismatch weight"
        cap = objective.seq_tis_imp_ratio_cap
        weighting = Weighting("geometric", "truncate", 1.0 / cap, cap)
    if objective.name == "mis_gspo":
        band = Rejection("ratio", "corr", "mean", objective.mis_ratio_low, objective.mis_ratio_high)
        rejections = (band, *rejections)
    return Correction(weighting, rejections, cfg.veto, bool(cfg.normalize))
