"""What objectives share: their inputs, safe ratios, their result, and statistics that add over micro-batches.

Log-probs are natural logarithms for the sampled token, with the sampling temperature and truncation applied. A token
outside the truncated distribution has log-prob -inf; its ratios are finite and it has no gradient. A NaN is never
hidden: it reaches the loss and the gradient, and the learner skips the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from qarl.objectives.segments import Segments

Estimator = Literal["k1", "k2", "k3"]

Stats = dict[str, "Tensor"]
"""Metric name -> (2,) float64: sum and count. They add over micro-batches; `finish_stats` divides once."""

MAX_EXPONENT = 20.0
"""Exponents are clamped to +-20 before exp; `*_clamped_frac` counts clamped exponents."""

INFINITE = 1e12
"""Replaces an infinite log ratio. A mean over fewer than 10^10 tokens that includes it still exceeds MAX_EXPONENT, fp32
sums do not overflow, and two of opposite sign in one response cancel instead of giving NaN."""

WEIGHT_MEAN, ESS = "correction/weight_mean", "correction/ess"
_WEIGHT_SQ_MEAN = "correction/weight_sq_mean"  # intermediate of the effective sample size
_BOUNDED_MEAN, _BOUNDED_SQ = "correction/bounded_mean", "correction/bounded_sq_mean"  # of correction/variance
RATIO_STATS = ("policy/ratio_mean", "policy/clip_frac", "policy/ratio_clamped_frac")


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probs of the sampled tokens in nats, packed: (T,) float32 each.

    Only `logp`, `entropy` and `divergence` have a gradient.

    Attributes:
        logp: Learner now.
        logp_old: Learner at the rollout's weights.
        logp_sampler: As the sampler reported.
        logp_shadow: The sampler's arithmetic at the current weights, with `objective.ratio: shadow`.
        logp_ref: Reference policy, with `objective.kl_coef`.
        entropy: Entropy of the learner's distribution at the token, in nats, with `objective.entropy_coef`.
        router_shift: Log of the router-shift ratio, at most 0.
        divergence: Divergence from the teacher, at least 0.
        agrees: (T,) bool, whether learner and teacher have the same most likely token.
    """

    logp: Tensor
    logp_old: Tensor
    logp_sampler: Tensor
    logp_shadow: Tensor | None = None
    logp_ref: Tensor | None = None
    entropy: Tensor | None = None
    router_shift: Tensor | None = None
    divergence: Tensor | None = None
    agrees: Tensor | None = None


class Pruned(NamedTuple):
    """Tokens and responses with weight 0 because of tokens outside the learner's truncated distribution."""

    tokens: Tensor  # (T,) bool, tokens with weight 0
    responses: Tensor  # (R,) bool, responses dropped as a whole because of one of their tokens
    outside: Tensor  # (T,) bool, tokens outside the distribution; a subset of `tokens`


@dataclass(frozen=True)
class SurrogateInputs:
    """Inputs of an objective for one micro-batch of T tokens and R responses.

    Attributes:
        logps: Log-probs of the tokens. Pruned tokens are 0 in every column, so their ratio is 1.
        log_ratio: (T,) float32, log of the ratio that `objective.ratio` selects, with the gradient of `logps.logp`;
            value 0 for objectives without a ratio.
        advantages: (R,) float32.
        segments: The response of each token.
        pruned: Tokens and responses whose value is replaced by 0.
        center: `ObjectiveConfig.center` of the minibatch.
    """

    logps: TokenLogProbs
    log_ratio: Tensor
    advantages: Tensor
    segments: Segments
    pruned: Pruned
    center: float = 0.0

    @property
    def token_advantages(self) -> Tensor:
        """(T,): the advantage of each token's response."""
        return self.segments.expand(self.advantages)

    @property
    def counted_tokens(self) -> Tensor:
        """(T,) bool: tokens that enter statistics, those that are not pruned."""
        return ~self.pruned.tokens

    @property
    def counted_responses(self) -> Tensor:
        """(R,) bool: responses that enter statistics, those that are neither empty nor pruned."""
        return self.segments.present & ~self.pruned.responses


@dataclass(frozen=True)
class Surrogate:
    """Result of an objective for one micro-batch.

    Attributes:
        value: (T,) value of each token, to maximize (minus a loss), with a gradient to the learner's log-probs.
        stats: Metric name -> sum and count, as `stat` returns them.
    """

    value: Tensor
    stats: Stats = field(default_factory=dict)


class Needs(NamedTuple):
    """What an objective needs in addition to the three log-probs that are always available."""

    shadow: bool = False  # logp_shadow (objective.ratio shadow)
    reference: bool = False  # logp_ref (objective.kl_coef > 0)
    entropy: bool = False  # entropy with gradient (objective.entropy_coef > 0)
    router_shift: bool = False  # router_shift (objective.router_shift_floor)
    teacher: bool = False  # divergence and agrees (objective.teacher)
    minibatch: bool = False  # `Constants` of the whole minibatch before its first backward


class Constants(NamedTuple):
    """Numbers of the whole minibatch that each micro-batch needs."""

    center: float = 0.0  # mean over the minibatch's tokens that loss detach_center subtracts
    weight_mean: float = 1.0  # mean correction weight, the divisor of correction.normalize
    cap: float | None = None  # upper bound of the correction weight with correction.cap: auto


def log_ratio(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """Compute log(p / p_reference) per token.

    Two equal infinities have ratio 1. A token with an infinite log-prob has no gradient.

    Args:
        logp: (T,) log-probs in nats; -inf outside a truncated distribution.
        logp_reference: (T,) log-probs of the reference.

    Returns:
        (T,) log ratios, finite unless an input is NaN: infinite ones become +-`INFINITE`.
    """
    both_infinite = logp.isinf() & (logp == logp_reference)
    difference = (logp - logp_reference).masked_fill(both_infinite, 0.0)
    difference = difference.masked_fill(difference == math.inf, INFINITE)
    return difference.masked_fill(difference == -math.inf, -INFINITE)


def clamp_exponent(exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Clamp an exponent to +-`MAX_EXPONENT`. `Tensor.clamp` is not used because it has no gradient at NaN either.

    Args:
        exponent: Any shape.

    Returns:
        The clamped exponent, and the bool mask of clamped elements, which have no gradient.
    """
    high, low = exponent > MAX_EXPONENT, exponent < -MAX_EXPONENT
    return exponent.masked_fill(high, MAX_EXPONENT).masked_fill(low, -MAX_EXPONENT), high | low


def clamped_exp(exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Compute exp(exponent) with the exponent clamped to +-20, so that the result is finite.

    Args:
        exponent: Any shape, such as a log ratio (T,).

    Returns:
        The exponential, and the bool mask of clamped elements, which have no gradient.
    """
    exponent, beyond = clamp_exponent(exponent)
    return exponent.exp(), beyond


def score(logp: Tensor) -> Tensor:
    """Return logp - stop(logp): (T,) zeros with d/d logp = 1. Infinite log-probs have no gradient."""
    finite = logp.masked_fill(logp.isinf(), 0.0)
    return finite - finite.detach()


def k_estimate(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(q || p) elementwise from log r, with r = p / q on samples of q (Schulman 2020).

    k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r, with log r clamped to +-20.

    Args:
        log_ratio: log r, any shape.
        estimator: k1, k2 or k3.

    Returns:
        Estimates in nats, in the shape of `log_ratio`.
    """
    x, _ = clamp_exponent(log_ratio)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    assert estimator == "k3", f"unknown estimator {estimator!r}"
    return x.expm1() - x


def stat(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum values for a metric: the mean over all micro-batches of a step is the sum of sums over the sum of counts.

    Args:
        values: Any shape; bool counts as 0 and 1.
        mask: Bool, same shape: which values to count. None: all.

    Returns:
        (2,) float64: sum and count, without gradient.
    """
    import torch

    values = values.detach().double()
    if mask is None:
        return torch.stack([values.sum(), values.new_full((), values.numel())])
    return torch.stack([values.masked_fill(~mask, 0.0).sum(), mask.sum().double()])


def ratio_stats(ratio: Tensor, clipped: Tensor, clamped: Tensor, mask: Tensor | None) -> Stats:
    """Compute the statistics of a ratio that the report shows: its mean, and the fractions clipped and clamped.

    Args:
        ratio: (T,) per token, or (R,) per response.
        clipped: Bool, same shape: elements that lose their gradient at a bound.
        clamped: Bool, same shape: elements with a clamped exponent, as `clamped_exp` returns them.
        mask: Bool, same shape: elements to count. None: all.

    Returns:
        `policy/ratio_mean`, `policy/clip_frac` and `policy/ratio_clamped_frac`, as `stat` returns them.
    """
    return {name: stat(x, mask) for name, x in zip(RATIO_STATS, (ratio, clipped, clamped), strict=True)}


def weight_balance(w: Tensor, counted: Tensor) -> Stats:
    """Compute the balance of W, the weight of a token's score (TRL precision study, section 10.2).

    `policy/mu_w`: mean of W. `policy/w_negative_frac`: fraction below 0. `policy/w_imbalance`: sum of the positive
    weights over the absolute sum of the negative ones; 0.0 if no weight is negative.
    """
    import torch

    value = w.detach().double().masked_fill(~counted, 0.0)
    imbalance = torch.stack([value.clamp(min=0.0).sum(), -value.clamp(max=0.0).sum()])
    return {
        "policy/mu_w": stat(w, counted),
        "policy/w_negative_frac": stat(w < 0, counted),
        "policy/w_imbalance": imbalance,
    }


def bound_stats(bounded: Tensor, ratio: Tensor, mask: Tensor | None) -> Stats:
    """Compute the bias and variance that bounding the ratios adds, per token or response (survey, section on TIS).

    `correction/bias` = mean(w - r), `correction/variance` = mean(w^2) - mean(w)^2, before rules and veto.
    """
    square = stat(bounded.double().square(), mask)
    return {"correction/bias": stat(bounded - ratio, mask), _BOUNDED_MEAN: stat(bounded, mask), _BOUNDED_SQ: square}


def weight_stats(weights: Tensor, mask: Tensor | None = None) -> Stats:
    """Compute mean and effective sample size of importance weights, float32 (T,) or (R,). mask: those to count."""
    return {WEIGHT_MEAN: stat(weights, mask), _WEIGHT_SQ_MEAN: stat(weights.double().square(), mask)}


def add_stats(total: Stats, part: Stats) -> Stats:
    """Combine the statistics of two disjoint parts. A name may be missing in one of them."""
    both = total.keys() & part.keys()
    return total | part | {name: total[name] + part[name] for name in both}


def finish_stats(total: Stats) -> dict[str, float]:
    """Divide sums by counts; 0.0 if nothing was counted. Synchronizes with the device once.

    `correction/ess` = (sum w)^2 / (n sum w^2), in (0, 1]: 1 for equal weights, 0.0 if all weights are 0.
    """
    import torch

    if not total:
        return {}
    rows = torch.stack(list(total.values())).cpu().tolist()
    metrics = {name: s / n if n else 0.0 for name, (s, n) in zip(total, rows, strict=True)}
    if _BOUNDED_SQ in metrics:
        metrics["correction/variance"] = max(metrics.pop(_BOUNDED_SQ) - metrics.pop(_BOUNDED_MEAN) ** 2, 0.0)
    if _WEIGHT_SQ_MEAN in metrics:
        square = metrics.pop(_WEIGHT_SQ_MEAN)
        metrics[ESS] = metrics[WEIGHT_MEAN] ** 2 / square if square else 0.0
    return metrics
