"""All corrections of a configuration as one weight per token."""

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

REJECTED = "correction/rejected_frac"


class Combined(NamedTuple):
    """What `Correction` returns.

    Attributes:
        weights: (T,), without gradient: the product of all parts, exactly 0 for pruned tokens.
        stats: Statistics of this micro-batch.
    """

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
        """Compute the weight of each token.

        Pruned tokens have weight 0. In everything computed over a response (weight, rules, veto) they count as
        unmoved, ratio 1: whether they drop their response is decided by the pruning alone.

        Statistics are per token if `per_token`, else per non-empty response:

            correction/weight_mean, correction/ess  of the final weights
            correction/rejected_frac    weight 0 for any reason: mask, rule, veto or pruning. A response counts if all
                                        its tokens have weight 0
            correction/raw_ratio_mean   weights before bounding
            correction/clamped_frac     exponents of weights clamped to +-20

        Per non-empty response: `correction/veto_frac`, the share that each rule rejects (rules of aggregate token: per
        token) and `correction/rule_clamped_frac` (an exponent of a rule was clamped).

        Args:
            logps: Log-probs, (T,) each.
            segments: Response of each token.
            weight_mean: Divisor of the weights; see `weight_mean`.
            pruned: Tokens outside the learner's truncated distribution; None is none.
        """
        signals = _Signals(logps, pruned)
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

        weights = logps.logp_old.new_ones(responses.shape)
        if self.weighting is not None:
            importance = self._importance(signals[self.weighting.signal], segments, pruned)
            weights = importance.weights / weight_mean
            unit = None if self.weighting.per_token else responses
            stats["correction/raw_ratio_mean"] = stat(importance.ratio, unit)
            stats["correction/clamped_frac"] = stat(importance.clamped, unit)
        if self.per_token and not (self.weighting is not None and self.weighting.per_token):
            weights = segments.expand(weights)
        if pruned is not None:
            keep, keep_tokens = keep & ~pruned.responses, keep_tokens & ~pruned.tokens
        if self.per_token:
            weights = weights.masked_fill(~(segments.expand(keep) & keep_tokens), 0.0)
            stats |= weight_stats(weights) | {REJECTED: stat(weights == 0.0)}
            return Combined(weights, stats)
        weights = weights.masked_fill(~keep, 0.0)
        per_token = segments.expand(weights).masked_fill(~keep_tokens, 0.0)
        stats |= weight_stats(weights, responses) | {REJECTED: stat(without_weight(per_token, segments), responses)}
        return Combined(per_token, stats)

    @torch.no_grad()
    def weight_mean(self, logps: TokenLogProbs, segments: Segments, pruned: Pruned | None = None) -> float:
        """Mean importance weight before rules and veto: over tokens at level token, else over non-empty responses.

        Pruned tokens (at level token) and responses dropped by the pruning count with weight 0.

        Returns:
            The mean; 1.0 without weights, or if every weight is 0.
        """
        if self.weighting is None:
            return 1.0
        signal = _Signals(logps, pruned)[self.weighting.signal]
        weights = self._importance(signal, segments, pruned).weights.double()
        if not self.weighting.per_token:
            weights = weights[present(segments)]
        mean = float(weights.mean()) if weights.numel() else 1.0
        return mean if mean != 0.0 else 1.0

    def _importance(self, signal: Tensor, segments: Segments, pruned: Pruned | None) -> ImportanceWeights:
        weighting = self.weighting
        assert weighting is not None, "there are no weights"
        found = importance_weights(signal, segments, weighting)
        if pruned is None:
            return found
        gone = pruned.tokens if weighting.per_token else pruned.responses
        return ImportanceWeights(
            found.weights.masked_fill(gone, 0.0),
            found.ratio.masked_fill(gone, 0.0),
            found.rejected & ~gone,
            found.clamped & ~gone,
        )


def without_weight(weights: Tensor, segments: Segments) -> Tensor:
    """Return bool (R,): responses whose tokens all have weight 0. weights: (T,)."""
    return segments.sum((weights != 0.0).to(torch.int64)) == 0


class _Signals:
    """Log ratios learner over sampler, (T,), 0 for pruned tokens.

    `corr` has the learner at the rollout's snapshot, `rollout` the learner now.
    """

    def __init__(self, logps: TokenLogProbs, pruned: Pruned | None) -> None:
        self._logps, self._pruned = logps, pruned

    def __getitem__(self, name: str) -> Tensor:
        learner = self._logps.logp_old if name == "corr" else self._logps.logp
        signal = log_ratio(learner, self._logps.logp_sampler)
        return signal if self._pruned is None else signal.masked_fill(self._pruned.tokens, 0.0)
