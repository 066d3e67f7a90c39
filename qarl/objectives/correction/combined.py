"""All corrections of a configuration as one weight a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qarl.objectives.correction.config import CorrectionConfig
from qarl.objectives.correction.rejection import Rejection, kept, rule_clamped, vetoed
from qarl.objectives.correction.weights import ImportanceWeights, Weighting, importance_weights
from qarl.objectives.ratios import log_ratio
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Stats, present, stat, weight_stats
from qarl.objectives.tokens import Pruned, TokenLogProbs


class Combined(NamedTuple):
    """weights: [T], without gradient, the product of all parts. stats: of this micro-batch."""

    weights: Tensor
    stats: Stats


@dataclass(frozen=True)
class Correction:
    """Weights, rules and veto; a response has to pass all of them, and a token those of aggregate token.

    weighting: None is weight 1. rejections: rules, in any order. veto: a response with a token of r_corr below it is
    dropped; None is no veto. normalize: weights are divided by their mean over the minibatch.
    """

    weighting: Weighting | None = None
    rejections: tuple[Rejection, ...] = ()
    veto: float | None = None
    normalize: bool = False

    @classmethod
    def from_config(cls, config: CorrectionConfig) -> Correction:
        """What a `correction` section describes."""
        weighting = None
        if config.level is not None and config.level != "none":
            assert config.mode is not None and config.signal is not None, "a checked configuration says both"
            weighting = Weighting(config.level, config.mode, config.lower, config.upper, config.signal)
        rejections = [Rejection(r.estimator, r.signal, r.aggregate, r.lower, r.upper) for r in config.reject or ()]
        return cls(weighting, tuple(rejections), config.veto, bool(config.normalize))

    @property
    def per_token(self) -> bool:
        """Tokens of a response may have different weights; statistics are then per token, else per response."""
        weighted = self.weighting is not None and self.weighting.per_token
        return weighted or any(rule.per_token for rule in self.rejections)

    @property
    def empty(self) -> bool:
        """Nothing is corrected."""
        return self.weighting is None and not self.rejections and self.veto is None

    @torch.no_grad()
    def __call__(
        self, logps: TokenLogProbs, segments: Segments, weight_mean: float = 1.0, pruned: Pruned | None = None
    ) -> Combined:
        """The weight of each token, divided by `weight_mean`.

        What is pruned has weight 0, and counts as unmoved in the sums and means that make a response's weight. Rules
        and veto see its ratio, which is 0.

        Statistics are per token where `per_token` and per non-empty response otherwise: `correction/weight_mean` and
        `correction/ess` of the final weights, `correction/rejected_frac` (weight 0 by mask, rule or veto). Of the
        weights as they are made: `correction/raw_ratio_mean` before bounding and `correction/clamped_frac` (exponents
        clamped to +-20). Per non-empty response: `correction/veto_frac`, a share for every rule (of aggregate token:
        per token) and `correction/rule_clamped_frac` (an exponent of a rule was clamped).
        """
        signals = _Signals(logps)
        responses, stats = present(segments), Stats()

        keep, keep_tokens = torch.ones_like(responses), torch.ones_like(segments.index, dtype=torch.bool)
        clamped = torch.zeros_like(responses)
        for rule in self.rejections:
            signal = signals[rule.signal]
            passed = kept(signal, segments, rule)
            clamped |= rule_clamped(signal, segments, rule)
            stats[rule.metric] = stat(~passed, None if rule.per_token else responses)
            if rule.per_token:
                keep_tokens &= passed
            else:
                keep &= passed
        if self.rejections:
            stats["correction/rule_clamped_frac"] = stat(clamped, responses)
        if self.veto is not None:
            dropped = vetoed(signals["corr"], segments, self.veto)
            stats["correction/veto_frac"] = stat(dropped, responses)
            keep &= ~dropped

        weights, rejected = logps.logp_old.new_ones(responses.shape), torch.zeros_like(responses)
        if self.weighting is not None:
            importance = self._importance(signals[self.weighting.signal], segments, pruned)
            weights, rejected = importance.weights / weight_mean, importance.rejected
            unit = None if self.weighting.per_token else responses
            stats["correction/raw_ratio_mean"] = stat(importance.ratio, unit)
            stats["correction/clamped_frac"] = stat(importance.clamped, unit)
        if self.per_token and not (self.weighting is not None and self.weighting.per_token):
            weights, rejected = segments.expand(weights), segments.expand(rejected)
        refused, gone = ~keep, ~keep if pruned is None else ~keep | pruned.responses
        if self.per_token:
            refused, gone = segments.expand(refused) | ~keep_tokens, segments.expand(gone) | ~keep_tokens
        weights, rejected = weights.masked_fill(gone, 0.0), rejected | refused
        mask = None if self.per_token else responses
        stats |= weight_stats(weights, mask)
        stats["correction/rejected_frac"] = stat(rejected, mask)
        return Combined(weights if self.per_token else segments.expand(weights), stats)

    @torch.no_grad()
    def weight_mean(self, logps: TokenLogProbs, segments: Segments, pruned: Pruned | None = None) -> float:
        """Mean importance weight before rules and veto: over tokens at level token, else over non-empty responses.
        What is pruned counts with weight 0.

        1 without weights, and where every weight is 0.
        """
        if self.weighting is None:
            return 1.0
        signal = _Signals(logps)[self.weighting.signal]
        weights = self._importance(signal, segments, pruned).weights.double()
        if not self.weighting.per_token:
            weights = weights[present(segments)]
        mean = float(weights.mean()) if weights.numel() else 1.0
        return mean if mean != 0.0 else 1.0

    def _importance(self, signal: Tensor, segments: Segments, pruned: Pruned | None) -> ImportanceWeights:
        weighting = self.weighting
        assert weighting is not None, "there are no weights"
        if pruned is None:
            return importance_weights(signal, segments, weighting)
        found = importance_weights(signal.masked_fill(pruned.tokens, 0.0), segments, weighting)
        gone = pruned.tokens if weighting.per_token else pruned.responses
        return ImportanceWeights(
            found.weights.masked_fill(gone, 0.0),
            found.ratio.masked_fill(gone, 0.0),
            found.rejected & ~gone,
            found.clamped & ~gone,
        )


class _Signals:
    """The log ratios learner over sampler, (T,): `corr`, at the rollout's snapshot, and `rollout`, now."""

    def __init__(self, logps: TokenLogProbs) -> None:
        self._logps = logps

    def __getitem__(self, name: str) -> Tensor:
        learner = self._logps.logp_old if name == "corr" else self._logps.logp
        return log_ratio(learner, self._logps.logp_sampler)
