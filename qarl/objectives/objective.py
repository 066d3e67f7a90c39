"""The objective of a configuration: surrogate, correction, penalties and aggregation in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qarl.objectives.aggregate import Aggregation, Totals, aggregate
from qarl.objectives.band import Band
from qarl.objectives.contribution import contribution_stats
from qarl.objectives.proximal import RatioKind, proximal_log_ratio
from qarl.objectives.ratios import log_ratio
from qarl.objectives.regularizers import Estimator, k_estimate, kl_to_reference
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Stats, Surrogate, stat
from qarl.objectives.tokens import Constants, Needs, TokenLogProbs

if TYPE_CHECKING:
    from qarl.correction import Correction

SurrogateOf = Callable[[Tensor, Tensor, Tensor, Segments, float], Surrogate]
"""(log ratio with gradient [T], logp [T], advantages [R], segments, center) -> surrogate."""


@dataclass(frozen=True)
class Objective:
    """What is maximised, built by `build_objective`.

    band: where the ratio still gives gradient; None if nothing ever loses its gradient.
    centered: W per token, whose mean over the minibatch is `Constants.center`; None if nothing is centred.
    """

    surrogate: SurrogateOf
    ratio: RatioKind
    aggregation: Aggregation
    correction: Correction
    band: Band | None = None
    centered: Callable[[Tensor, Tensor, Segments], Tensor] | None = None
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy_coef: float = 0.0

    @property
    def needs(self) -> Needs:
        """What the learner has to bring beside the three log-probs."""
        return Needs(
            shadow=self.ratio == "shadow",
            reference=self.kl_coef > 0.0,
            entropy=self.entropy_coef > 0.0,
            minibatch=self.centered is not None or self.correction.normalize,
        )

    @property
    def zero_advantage_is_idle(self) -> bool:
        """A response with advantage 0 gives exactly no gradient, so it needs no backward."""
        return self.centered is None and self.kl_coef == 0.0 and self.entropy_coef == 0.0

    @torch.no_grad()
    def log_ratio(self, logps: TokenLogProbs, segments: Segments) -> Tensor:
        """(T,) the per-token log ratio the surrogate works with, without gradient; zeros where it works with none."""
        return proximal_log_ratio(logps, self.ratio)

    def weights(self, logps: TokenLogProbs, segments: Segments) -> Tensor | None:
        """(T,) correction weights with rules and veto, before `correction.normalize`; None without correction."""
        return None if self.correction.empty else self.correction(logps, segments).weights

    @torch.no_grad()
    def constants(self, logps: TokenLogProbs, advantages: Tensor, segments: Segments) -> Constants:
        """The constants of a whole minibatch: logps and segments of all its responses, advantages (R,). No gradient."""
        center = 0.0
        if self.centered is not None and logps.logp.numel():
            center = float(self.centered(self.log_ratio(logps, segments), advantages, segments).double().mean())
        normalize = self.correction.normalize
        return Constants(center, self.correction.weight_mean(logps, segments) if normalize else 1.0)

    def __call__(
        self,
        logps: TokenLogProbs,
        advantages: Tensor,  # (R,)
        segments: Segments,
        totals: Totals,
        constants: Constants = Constants(),  # noqa: B008 (an immutable tuple)
    ) -> tuple[Tensor, Stats]:
        """(loss, stats) of one micro-batch: minus the aggregate of w * surrogate - kl_coef * K + entropy_coef * H.

        Correction weights w multiply the surrogate alone: the KL and the entropy are of the learner's own distribution
        and count at every token, rejected or not. Losses of the micro-batches of a minibatch add up to its loss, and
        their stats by `add_stats`; `finish_stats` makes metrics of the sum.
        """
        surrogate = self.surrogate(
            proximal_log_ratio(logps, self.ratio), logps.logp, advantages, segments, constants.center
        )
        value, stats = surrogate.value, surrogate.stats | _token_stats(logps, advantages, segments)
        if not self.correction.empty:
            corrected = self.correction(logps, segments, constants.weight_mean)
            value, stats = value * corrected.weights, stats | corrected.stats
        if self.kl_coef > 0.0:
            assert logps.logp_ref is not None, "kl_coef needs logp_ref"
            kl = kl_to_reference(logps.logp, logps.logp_ref, self.kl_estimator)
            value, stats = value - self.kl_coef * kl, stats | {"policy/kl_ref": stat(kl)}
        if self.entropy_coef > 0.0:
            assert logps.entropy is not None, "entropy_coef needs the entropy"
            value = value + self.entropy_coef * logps.entropy
        return -aggregate(value, segments, self.aggregation, *totals), stats


@torch.no_grad()
def _token_stats(logps: TokenLogProbs, advantages: Tensor, segments: Segments) -> Stats:
    """Statistics of every objective, per token.

    `policy/kl_k3` = mean(r - 1 - log r) with r learner now over learner at the snapshot, an estimate of KL(old || now)
    on tokens drawn from the old policy (Schulman 2020). `policy/outside_frac`: tokens outside the learner's truncated
    distribution, now or at the snapshot (DVP, theorem 5.3: their ratio is 0).
    """
    outside = torch.isneginf(logps.logp) | torch.isneginf(logps.logp_old)
    return {
        "policy/kl_k3": stat(k_estimate(log_ratio(logps.logp, logps.logp_old), "k3")),
        "policy/outside_frac": stat(outside),
    } | contribution_stats(logps, advantages, segments)
