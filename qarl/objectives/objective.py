"""The objective of a configuration: surrogate, correction, penalties and aggregation in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.objectives.aggregate import Totals, aggregate
from qarl.objectives.band import Band
from qarl.objectives.base import ObjectiveConfig, PruningLevel, SurrogateFunction
from qarl.objectives.contribution import contribution_stats
from qarl.objectives.correction.combined import Correction, without_weight
from qarl.objectives.proximal import RatioKind, proximal_log_ratio
from qarl.objectives.pruning import prune, without
from qarl.objectives.ratios import MAX_EXPONENT, log_ratio
from qarl.objectives.regularizers import k_estimate, kl_to_reference
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Stats, present, stat
from qarl.objectives.tokens import Constants, Needs, Pruned, SurrogateInputs, TokenLogProbs

OUTSIDE = "policy/outside_frac"
OUTSIDE_RESPONSES = "policy/outside_responses_frac"
ZERO_WEIGHT_RESPONSES = "policy/zero_weight_responses_frac"


@dataclass(frozen=True)
class Objective:
    """The function that training maximises, built by `build_objective`.

    Attributes:
        config: The section, with the objective's class.
        surrogate: Values of a micro-batch's tokens.
        correction: Weights that multiply the surrogate.
        pruning: What a token outside the learner's truncated distribution drops (`pruning.py`).
    """

    config: ObjectiveConfig
    surrogate: SurrogateFunction
    correction: Correction
    pruning: PruningLevel

    @property
    def ratio(self) -> RatioKind:
        """The ratio that the surrogate works with."""
        return self.config.ratio_kind

    @property
    def band(self) -> Band | None:
        """Where that ratio still gives gradient; None if nothing ever loses its gradient."""
        return self.config.band

    @property
    def needs(self) -> Needs:
        """What the learner has to bring beside the three log-probs."""
        return Needs(
            shadow=self.ratio == "shadow",
            reference=self.config.kl_coef > 0.0,
            entropy=self.config.entropy_coef > 0.0,
            minibatch=self.config.centers or self.correction.normalize,
        )

    @property
    def zero_advantage_is_idle(self) -> bool:
        """A response with advantage 0 gives exactly no gradient, so it needs no backward."""
        config = self.config
        everywhere = (config.kl_coef, config.entropy_coef, config.router_aux_coef, config.router_z_coef)
        return config.idle_at_zero and not config.centers and not any(everywhere)

    @torch.no_grad()
    def log_ratio(self, logps: TokenLogProbs, segments: Segments) -> Tensor:
        """Return the per-token log ratio that the surrogate clips, (T,), without gradient; zeros if it has none.

        A pruned token keeps its infinite ratio for a band per token. In a band per response it counts as unmoved, as in
        the surrogate: a mean over the response would be infinite otherwise.
        """
        if self.band is not None and self.band.level == "sequence":
            logps = without(logps, self.pruned(logps, segments))
        return proximal_log_ratio(logps, self.ratio)

    def pruned(self, logps: TokenLogProbs, segments: Segments) -> Pruned:
        """Find what has weight 0 because of tokens outside the learner's truncated distribution, if it is truncated."""
        return prune(logps, segments, self.pruning, self.ratio == "shadow")

    def weights(self, logps: TokenLogProbs, segments: Segments) -> Tensor | None:
        """Return the correction weights, (T,), with rules, veto and pruning, before `correction.normalize`.

        None without correction.
        """
        if self.correction.empty:
            return None
        return self.correction(logps, segments, pruned=self.pruned(logps, segments)).weights

    @torch.no_grad()
    def constants(self, logps: TokenLogProbs, advantages: Tensor, segments: Segments) -> Constants:
        """The constants of a whole minibatch: logps and segments of all its responses, advantages (R,). No gradient."""
        pruned, center = self.pruned(logps, segments), 0.0
        if self.config.centers and logps.logp.numel():
            center = self.config.center(self._inputs(logps, advantages, segments, pruned))
        normalize = self.correction.normalize
        return Constants(center, self.correction.weight_mean(logps, segments, pruned) if normalize else 1.0)

    def __call__(
        self,
        logps: TokenLogProbs,
        advantages: Tensor,  # (R,)
        segments: Segments,
        totals: Totals,
        constants: Constants = Constants(),  # noqa: B008 (an immutable tuple)
    ) -> tuple[Tensor, Stats]:
        """Compute the loss of one micro-batch: minus the aggregate of w * surrogate - kl_coef * K + entropy_coef * H.

        Correction weights w multiply the surrogate alone: the KL and the entropy are of the learner's own distribution
        and count at every token, rejected, pruned or not. Losses of the micro-batches of a minibatch add up to its
        loss, and their stats by `add_stats`; `finish_stats` makes metrics of the sum.

        Returns:
            The loss, and statistics. Beside those of the surrogate, the correction and `_token_stats` there is
            `policy/zero_weight_responses_frac`: non-empty responses whose tokens all have weight 0, by the correction
            (mask, rule, veto), by pruning, or by both.
        """
        pruned = self.pruned(logps, segments)
        surrogate = self.surrogate(self._inputs(logps, advantages, segments, pruned, constants.center))
        value, stats = surrogate.value, surrogate.stats | _token_stats(logps, advantages, segments, pruned)
        if not self.correction.empty:
            corrected = self.correction(logps, segments, constants.weight_mean, pruned)
            value, stats = value * corrected.weights, stats | corrected.stats
            weights = corrected.weights
        else:
            weights = (~pruned.tokens).to(value.dtype)
        stats[ZERO_WEIGHT_RESPONSES] = stat(without_weight(weights, segments), present(segments))
        value = value.masked_fill(pruned.tokens, 0.0)
        config = self.config
        if config.kl_coef > 0.0:
            assert logps.logp_ref is not None and config.kl_estimator is not None, "kl_coef needs both"
            kl = kl_to_reference(logps.logp, logps.logp_ref, config.kl_estimator)
            beyond = log_ratio(logps.logp, logps.logp_ref).abs() > MAX_EXPONENT
            value = value - config.kl_coef * kl
            stats = stats | {"policy/kl_ref": stat(kl), "policy/kl_ref_clamped_frac": stat(beyond)}
        if config.entropy_coef > 0.0:
            assert logps.entropy is not None, "entropy_coef needs the entropy"
            value = value + config.entropy_coef * logps.entropy
        return -aggregate(value, segments, config.aggregation, *totals), stats

    def _inputs(
        self, logps: TokenLogProbs, advantages: Tensor, segments: Segments, pruned: Pruned, center: float = 0.0
    ) -> SurrogateInputs:
        inside = without(logps, pruned)
        return SurrogateInputs(inside, proximal_log_ratio(inside, self.ratio), advantages, segments, pruned, center)


@torch.no_grad()
def _token_stats(logps: TokenLogProbs, advantages: Tensor, segments: Segments, pruned: Pruned) -> Stats:
    """Statistics of every objective, per token.

    `policy/kl_k3` = mean(r - 1 - log r) with r learner now over learner at the snapshot, an estimate of KL(old || now)
    on tokens drawn from the old policy (Schulman 2020), over the tokens inside both distributions.
    `policy/kl_clamped_frac`: tokens whose log r was clamped to +-20, here or in a contribution. `policy/outside_frac`:
    tokens outside the learner's truncated distribution, now or at the snapshot, or outside the shadow's with ratio
    shadow; their weight is 0. `policy/outside_responses_frac`: responses with such a token; with objective.dvp_outside
    `response` their weight is 0 as a whole.
    """
    outside = pruned.outside
    moved = log_ratio(logps.logp, logps.logp_old)
    apart = log_ratio(logps.logp, logps.logp_sampler)
    return {
        "policy/kl_k3": stat(k_estimate(moved, "k3"), ~outside),
        "policy/kl_clamped_frac": stat((moved.abs() > MAX_EXPONENT) | (apart.abs() > MAX_EXPONENT)),
        OUTSIDE: stat(outside),
        OUTSIDE_RESPONSES: stat(segments.sum(outside.to(torch.int64)) > 0, present(segments)),
    } | contribution_stats(without(logps, pruned), advantages, segments, pruned)
