"""The objective that training maximizes: surrogate, correction, penalties and aggregation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qarl.objectives.base import Band, ObjectiveConfig, PruningLevel, RatioKind, SurrogateFunction
from qarl.objectives.common import (
    MAX_EXPONENT,
    Constants,
    Estimator,
    Needs,
    Pruned,
    Stats,
    SurrogateInputs,
    TokenLogProbs,
    clamped_exp,
    k_estimate,
    log_ratio,
    score,
    stat,
)
from qarl.objectives.correction import correct, mean_weight, optimal_cap
from qarl.objectives.correction_config import CorrectionConfig
from qarl.objectives.segments import Segments, Totals, aggregate

OUTSIDE = "policy/outside_frac"
OUTSIDE_RESPONSES = "policy/outside_responses_frac"
ZERO_WEIGHT_RESPONSES = "policy/zero_weight_responses_frac"


def build_objective(config: ObjectiveConfig, correction: CorrectionConfig) -> Objective:
    """Build the objective of a configuration.

    Args:
        config: The `objective` section.
        correction: The `correction` section.

    Returns:
        The objective, with the correction that the objective itself adds.

    Raises:
        UserError: The user's own objective cannot be imported.
    """
    pruning = config.dvp_outside or config.default_pruning(correction.level)
    correction = config.corrected(correction)
    return Objective(config, config.bind(), config.ratio_kind, correction if correction.active else None, pruning)


@dataclass(frozen=True)
class Objective:
    """The function that training maximizes."""

    config: ObjectiveConfig
    surrogate: SurrogateFunction  # value of each token of a micro-batch
    ratio: RatioKind  # the ratio that the surrogate works with
    correction: CorrectionConfig | None  # weights, rules and veto, including the objective's own
    pruning: PruningLevel  # what a token outside the learner's truncated distribution drops

    def __call__(
        self,
        logps: TokenLogProbs,
        advantages: Tensor,  # (R,)
        segments: Segments,
        totals: Totals,
        constants: Constants = Constants(),  # noqa: B008 (an immutable tuple)
    ) -> tuple[Tensor, Stats]:
        """Compute the loss of one micro-batch.

        It is minus the aggregate of w * surrogate - kl_coef * K - teacher.coef * D + entropy_coef * H. The correction
        weight w multiplies only the surrogate. KL, divergence D from the teacher, and entropy are properties of the
        learner's own distribution, so they count at every token, including rejected and pruned ones. The losses of the
        micro-batches add up to the loss of the minibatch; `add_stats` adds their statistics.

        Args:
            logps: Log-probs of the T tokens.
            advantages: (R,) advantages.
            segments: The response of each token.
            totals: Sizes of the whole minibatch.
            constants: Result of `constants` for the whole minibatch, if `needs.minibatch`.

        Returns:
            The loss, and the statistics of the surrogate, the correction and `_token_stats`. They include
            `policy/zero_weight_responses_frac`: fraction of non-empty responses in which all tokens have weight 0,
            because of the correction (mask, rule, veto), pruning, or both.
        """
        config = self.config
        inputs = self._inputs(logps, advantages, segments, constants.center)
        pruned = inputs.pruned
        surrogate = self.surrogate(inputs)
        value, stats = surrogate.value, surrogate.stats | (_token_stats(logps, inputs) if config.rewarded else {})
        if logps.router_shift is not None and config.router_floor is not None:
            gamma, counted = logps.router_shift.exp(), inputs.counted_tokens
            stats["router/shift_mean"] = stat(gamma, counted)
            stats["router/shift_floored_frac"] = stat(gamma < config.router_floor, counted)
        if self.correction:
            correction = self.correction.capped(constants.cap)
            weights, correction_stats = correct(correction, logps, segments, pruned, constants.weight_mean)
            value, stats = value * weights, stats | correction_stats
        else:
            weights = (~pruned.tokens).to(value.dtype)
        stats[ZERO_WEIGHT_RESPONSES] = stat(~segments.any(weights != 0.0), segments.present)
        value = value.masked_fill(pruned.tokens, 0.0)
        if config.kl_coef > 0.0:
            assert logps.logp_ref is not None and config.kl_estimator is not None, "kl_coef needs both"
            kl = kl_to_reference(logps.logp, logps.logp_ref, config.kl_estimator)
            apart = logps.logp - logps.logp_ref  # infinite or NaN for tokens outside, which have no estimate
            beyond = apart.isfinite() & (apart.abs() > MAX_EXPONENT)
            value = value - config.kl_coef * kl
            stats = stats | {"policy/kl_ref": stat(kl), "policy/kl_ref_clamped_frac": stat(beyond)}
        if config.teacher is not None:
            assert logps.divergence is not None and logps.agrees is not None, "a teacher needs both"
            value = value - config.teacher.coef * logps.divergence
            stats |= {"teacher/divergence": stat(logps.divergence), "teacher/top1_agreement": stat(logps.agrees)}
        if config.entropy_coef > 0.0:
            assert logps.entropy is not None, "entropy_coef needs the entropy"
            value = value + config.entropy_coef * logps.entropy
        return -aggregate(value, segments, config.aggregation, totals), stats

    @property
    def band(self) -> Band | None:
        """The ratios that give gradient; None if no token loses its gradient at a bound."""
        return self.config.band

    @property
    def needs(self) -> Needs:
        """What the learner has to compute in addition to the three log-probs."""
        return Needs(
            shadow=self.ratio == "shadow",
            reference=self.config.kl_coef > 0.0,
            entropy=self.config.entropy_coef > 0.0,
            router_shift=self.config.router_floor is not None,
            teacher=self.config.teacher is not None,
            minibatch=self.config.centers or bool(self.correction and self.correction.needs_minibatch),
        )

    @property
    def zero_advantage_is_idle(self) -> bool:
        """Whether responses with advantage 0 have exactly zero gradient, so that they need no backward."""
        config = self.config
        everywhere = (config.kl_coef, config.entropy_coef, config.router_aux_coef, config.router_z_coef)
        return config.idle_at_zero and config.teacher is None and not any(everywhere)

    @torch.no_grad()
    def log_ratio(self, logps: TokenLogProbs, segments: Segments) -> Tensor:
        """Compute the log ratio per token that the surrogate clips: (T,), without gradient; 0 if it clips none.

        A pruned token keeps its infinite ratio if the band is per token. If it is per response, the token counts as
        unmoved, as in the surrogate; otherwise the mean over its response would be infinite.
        """
        if self.band is not None and self.band.level == "sequence":
            logps = without(logps, self.pruned(logps, segments))
        return self._ratio(logps)

    def weights(self, logps: TokenLogProbs, segments: Segments) -> Tensor | None:
        """Return the correction weights (T,) before `correction.normalize`; None without correction.

        With `correction.cap: auto` the cap is that of the given tokens.
        """
        if not self.correction:
            return None
        pruned = self.pruned(logps, segments)
        correction = self.correction.capped(optimal_cap(self.correction, logps, segments, pruned))
        return correct(correction, logps, segments, pruned)[0]

    @torch.no_grad()
    def constants(self, logps: TokenLogProbs, advantages: Tensor, segments: Segments) -> Constants:
        """Compute the constants of a whole minibatch from all its responses, without gradient. advantages: (R,)."""
        inputs, center, weight_mean, cap = self._inputs(logps, advantages, segments), 0.0, 1.0, None
        if self.config.centers and logps.logp.numel():
            center = self.config.center(inputs)
        if self.correction:
            cap = optimal_cap(self.correction, logps, segments, inputs.pruned)
            if self.correction.normalize:
                weight_mean = mean_weight(self.correction.capped(cap), logps, segments, inputs.pruned)
        return Constants(center, weight_mean, cap)

    @torch.no_grad()
    def pruned(self, logps: TokenLogProbs, segments: Segments) -> Pruned:
        """Find tokens and responses that get weight 0 because of tokens outside the learner's truncated distribution.

        A token is outside if the learner's log-prob is -inf, now or at the rollout's weights. With ratio shadow, it is
        also outside if the shadow's log-prob is -inf. Dynamic vocabulary pruning (DVP, theorem 5.3, equation 22) has an
        estimator over trajectories: the ratio of a response with a token outside is 0, so the whole response is
        dropped. This does not apply to top-p and top-k. After an update the learner's set differs from the rollout's,
        and a few tokens per thousand fall outside. Dropping their responses would drop most long responses, so only
        the token gets weight 0.

        Weight 0 is exact: no value and no gradient. Pruned tokens stay in the denominators of the aggregation, like
        rejected ones. A token with a NaN is never pruned, nor is its response: the NaN has to reach the loss.
        """
        learner = [logps.logp, logps.logp_old]
        if self.ratio == "shadow":
            assert logps.logp_shadow is not None, "ratio shadow needs logp_shadow"
            learner.append(logps.logp_shadow)
        broken = torch.stack([x.isnan() for x in (*learner, logps.logp_sampler)]).any(0)
        outside = torch.stack([x.isneginf() for x in learner]).any(0) & ~broken
        if self.pruning == "token":
            return Pruned(outside, torch.zeros_like(segments.present), outside)
        responses = segments.any(outside) & ~segments.any(broken)
        return Pruned(outside | segments.expand(responses), responses, outside)

    def _inputs(
        self, logps: TokenLogProbs, advantages: Tensor, segments: Segments, center: float = 0.0
    ) -> SurrogateInputs:
        pruned = self.pruned(logps, segments)
        inside = without(logps, pruned)
        return SurrogateInputs(inside, self._ratio(inside), advantages, segments, pruned, center)

    def _ratio(self, logps: TokenLogProbs) -> Tensor:
        """Return log r per token (T,), with the gradient of the learner's log-prob (TRL precision study, section 9).

        train    l - o, learner now over learner at the rollout's weights (recompute mode, three policies)
        rollout  l - b, learner now over what the sampler reported (bypass mode, two policies)
        shadow   value q - b, the sampler's arithmetic at the current weights; gradient of l
        one      value 0; gradient of l

        With `objective.router_shift_floor` the ratio is multiplied by the router-shift ratio, a constant in [floor, 1]
        (RSPO, arXiv 2510.23027).
        """
        ratio, floor = self._plain_ratio(logps), self.config.router_floor
        if floor is None or logps.router_shift is None:  # diagnostics at the rollout's weights, where nothing shifted
            return ratio
        return ratio + logps.router_shift.clamp(min=math.log(floor))

    def _plain_ratio(self, logps: TokenLogProbs) -> Tensor:
        if self.ratio == "train":
            return log_ratio(logps.logp, logps.logp_old)
        if self.ratio == "rollout":
            return log_ratio(logps.logp, logps.logp_sampler)
        if self.ratio == "one":
            return score(logps.logp)
        assert logps.logp_shadow is not None, "ratio shadow needs logp_shadow"
        return log_ratio(logps.logp_shadow, logps.logp_sampler).detach() + score(logps.logp)


def without(logps: TokenLogProbs, pruned: Pruned) -> TokenLogProbs:
    """Set pruned tokens to 0 in every column, so that they have ratio 1 and no gradient.

    Sums and means over their response then ignore them. The caller sets their values to 0 afterwards.
    """
    shadow, shift = logps.logp_shadow, logps.router_shift
    return replace(
        logps,
        logp=logps.logp.masked_fill(pruned.tokens, 0.0),
        logp_old=logps.logp_old.masked_fill(pruned.tokens, 0.0),
        logp_sampler=logps.logp_sampler.masked_fill(pruned.tokens, 0.0),
        logp_shadow=None if shadow is None else shadow.masked_fill(pruned.tokens, 0.0),
        router_shift=None if shift is None else shift.masked_fill(pruned.tokens, 0.0),
    )


def kl_to_reference(logp: Tensor, logp_ref: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(learner || reference) per token, (T,), from r = exp(ref - l), with a gradient to `logp`.

    The expected gradient of each estimator over tokens that the learner samples:

    - k1: its own gradient, -1 per token, is 0 in expectation. It gets the gradient of k2 instead (straight through), so
      the loss has the value of k1 and the gradient of KL(learner || reference).
    - k2: the gradient of KL(learner || reference) exactly, although its value is biased.
    - k3: the gradient of the reverse, KL(reference || learner), although its value is unbiased. The two agree to first
      order in the distance of the distributions.

    A token outside the truncated distribution of the learner or of the reference has no finite estimate. It gets value
    0 and no gradient. A log ratio beyond +-20 is clamped and has no gradient.
    """
    outside, x = logp.isinf() | logp_ref.isinf(), log_ratio(logp_ref, logp)
    value = k_estimate(x, estimator)
    if estimator == "k1":
        k2 = k_estimate(x, "k2")
        value = value.detach() + (k2 - k2.detach())
    return value.masked_fill(outside, 0.0)


@torch.no_grad()
def _token_stats(logps: TokenLogProbs, inputs: SurrogateInputs) -> Stats:
    """Compute the statistics that every objective has.

    `policy/kl_k1`, `policy/kl_k3`: mean(-log r) and mean(r - 1 - log r) over tokens inside, with r learner now over
    learner at the rollout's weights, estimates of KL(old || now). `policy/rollout_k1`, `policy/rollout_k3`: the same
    with r learner now over the sampler (VeXact, figure 4). `policy/kl_clamped_frac`: tokens inside whose log r was
    clamped to +-20. `policy/outside_frac`, `policy/outside_responses_frac`: tokens outside (see
    `Objective.pruned`), and responses with such a token.
    """
    outside, segments = inputs.pruned.outside, inputs.segments
    moved = log_ratio(logps.logp, logps.logp_old)
    apart = log_ratio(logps.logp, logps.logp_sampler)
    return {
        "policy/kl_k1": stat(k_estimate(moved, "k1"), ~outside),
        "policy/kl_k3": stat(k_estimate(moved, "k3"), ~outside),
        "policy/rollout_k1": stat(k_estimate(apart, "k1"), ~outside),
        "policy/rollout_k3": stat(k_estimate(apart, "k3"), ~outside),
        "policy/kl_clamped_frac": stat(~outside & ((moved.abs() > MAX_EXPONENT) | (apart.abs() > MAX_EXPONENT))),
        OUTSIDE: stat(outside),
        OUTSIDE_RESPONSES: stat(segments.any(outside), segments.present),
    } | contribution_stats(logps, inputs.advantages, segments, inputs.pruned)


@torch.no_grad()
def contribution_stats(logps: TokenLogProbs, advantages: Tensor, segments: Segments, pruned: Pruned) -> Stats:
    """Compute means of the zero-centred contribution C(r) = -(r - 1) A by the sign of A (VeXact section 4.1, figure 5).

    `train` uses r = exp(l - o), the ratio of a recomputed update; `rollout` uses r = exp(l - b). They are equal without
    mismatch. A gap for only one sign is the paper's early sign of instability. Pruned tokens do not count.
    """
    advantage, live = segments.expand(advantages), ~pruned.tokens
    stats = Stats()
    for name, reference in (("train", logps.logp_old), ("rollout", logps.logp_sampler)):
        ratio, _ = clamped_exp(log_ratio(logps.logp, reference))
        contribution = -(ratio - 1.0) * advantage
        stats[f"policy/contribution_{name}_pos"] = stat(contribution, live & (advantage > 0))
        stats[f"policy/contribution_{name}_neg"] = stat(contribution, live & (advantage < 0))
    return stats
