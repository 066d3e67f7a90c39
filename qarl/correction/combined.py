"""All corrections of a configuration as one weight a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qarl.correction.rejection import Rejection, kept, vetoed
from qarl.correction.weights import Weighting, importance_weights
from qarl.objectives.ratios import log_ratio
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Stats, present, stat, weight_stats
from qarl.objectives.tokens import TokenLogProbs


class Combined(NamedTuple):
    """weights: [T], without gradient, the product of all parts. stats: of this micro-batch."""

    weights: Tensor
    stats: Stats


@dataclass(frozen=True)
class Correction:
    """Weights, rules and veto; a response has to pass all of them.

    weighting: None is weight 1. rejections: rules, in any order. veto: a response with a token of r_corr below it is
    dropped; None is no veto. normalize: weights are divided by their mean over the minibatch.
    """

    weighting: Weighting | None = None
    rejections: tuple[Rejection, ...] = ()
    veto: float | None = None
    normalize: bool = False

    @property
    def empty(self) -> bool:
        """Nothing is corrected."""
        return self.weighting is None and not self.rejections and self.veto is None

    @torch.no_grad()
    def __call__(self, logps: TokenLogProbs, segments: Segments, weight_mean: float = 1.0) -> Combined:
        """The weight of each token, divided by `weight_mean`.

        Statistics are per token at level token and per non-empty response otherwise: `correction/weight_mean` and
        `correction/ess` of the final weights, `correction/rejected_frac` (weight 0 by mask, rule or veto),
        `correction/raw_ratio_mean` before bounding and `correction/clamped_frac` (exponents clamped to +-20); per
        non-empty response: `correction/veto_frac` and a share for every rule.
        """
        corr = log_ratio(logps.logp_old, logps.logp_sampler)
        responses, stats = present(segments), Stats()

        keep = torch.ones_like(responses)
        for rule in self.rejections:
            signal = corr if rule.signal == "corr" else log_ratio(logps.logp, logps.logp_sampler)
            passed = kept(signal, segments, rule)
            stats[rule.metric] = stat(~passed, responses)
            keep &= passed
        if self.veto is not None:
            dropped = vetoed(corr, segments, self.veto)
            stats["correction/veto_frac"] = stat(dropped, responses)
            keep &= ~dropped

        per_token = self.weighting is not None and self.weighting.per_token
        mask = None if per_token else responses
        spread = segments.expand if per_token else _same
        rejected = spread(~keep)
        weights = torch.ones_like(corr) if per_token else corr.new_ones(responses.shape)
        if self.weighting is not None:
            importance = importance_weights(corr, segments, self.weighting)
            weights = importance.weights / weight_mean
            rejected = rejected | importance.rejected
            stats["correction/raw_ratio_mean"] = stat(importance.ratio, mask)
            stats["correction/clamped_frac"] = stat(importance.clamped, mask)
        weights = weights.masked_fill(spread(~keep), 0.0)
        stats |= weight_stats(weights, mask)
        stats["correction/rejected_frac"] = stat(rejected, mask)
        return Combined(weights if per_token else segments.expand(weights), stats)

    @torch.no_grad()
    def weight_mean(self, logps: TokenLogProbs, segments: Segments) -> float:
        """Mean importance weight before rules and veto: over tokens at level token, else over non-empty responses.

        1 without weights, and where every weight is 0.
        """
        if self.weighting is None:
            return 1.0
        corr = log_ratio(logps.logp_old, logps.logp_sampler)
        weights = importance_weights(corr, segments, self.weighting).weights.double()
        if not self.weighting.per_token:
            weights = weights[present(segments)]
        mean = float(weights.mean()) if weights.numel() else 1.0
        return mean if mean != 0.0 else 1.0


def _same(x: Tensor) -> Tensor:
    return x
