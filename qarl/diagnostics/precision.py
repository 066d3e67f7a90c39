"""Split a log ratio into the policy's change and the effect of precision.

TRL study (Dirhoussi et al. 2026), sections 6, 7.7 and 10.3. The shadow log-prob q_t comes from a forward in the
sampler's precision at the learner's current weights. With l_t from the learner and b_t from the sampler,

    alpha_t = q_t - b_t    change of the deployed policy since the rollout
    beta_t  = l_t - q_t    effect of the learner's precision; l_t - b_t = alpha_t + beta_t
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qarl.objectives.common import log_ratio as finite_log_ratio
from qarl.objectives.segments import Segments

if TYPE_CHECKING:
    from qarl.objectives.base import Band

PARTS = ("eos_", "rest_", "beta_abs_logp_")  # omitted if no token belongs to the part
LOG_PROBS = (math.inf, 20.0, 10.0, 5.0, 2.0, 0.5, 0.0)  # minus the bounds of the ranges, in nats


@torch.no_grad()
def precision_metrics(
    logp: Tensor,  # (T,) learner
    logp_shadow: Tensor,  # (T,) the sampler's arithmetic at the same weights
    logp_sampler: Tensor,  # (T,) as the sampler reported
    log_ratio: Tensor,  # (T,) clipped by the objective, `Objective.log_ratio`
    advantages: Tensor,  # (R,)
    segments: Segments,
    band: Band | None,
    ends: Tensor | None = None,  # (T,) bool, tokens that ended their response
) -> dict[str, float]:
    """Compute the precision/* metrics of a batch:

        alpha_abs_mean, beta_abs_mean, beta_abs_max, beta_mean, beta_std  nats
        snr                 mean|alpha| / mean|beta|; below 1 the ratio is mostly precision. Omitted if beta is 0
        beta_advantage_mean mean of beta A: first-order effect of precision on the effective advantage
        beta_advantage_corr Pearson correlation of beta with the token's advantage. Omitted if either is constant
        ratio_off_10_frac, ratio_off_50_frac  |exp(beta) - 1| above 0.1, above 0.5
        clipped_frac        outside the objective's bounds under exp(alpha), for either sign of A: the policy moved
        clipped_lost_frac   those of clipped_frac on the side that the sign of A clips, so without gradient
        phantom_frac        outside under the objective's ratio (exp(alpha + beta) for ratio rollout) but inside under
                            exp(alpha), for either sign of A: precision alone, as the study counts
        phantom_lost_frac   those of phantom_frac without gradient. All four are omitted without a band
        outside_frac        one of the three log-probs is infinite: outside its truncated distribution
        eos_frac            tokens that end a response. For these tokens and for the rest (section 8.3) there are
                            alpha_abs_mean, beta_abs_mean, beta_mean, beta_std and phantom_frac with the prefixes eos_
                            and rest_. Omitted if there are no such tokens
        beta_abs_logp_LOW_HIGH  mean |beta| of tokens with a learner log-prob in [-LOW, -HIGH); the last range
                            includes 0 (section 8.2: rare tokens have the largest). Omitted for empty ranges

    Only the clipping fractions and outside_frac include tokens outside a distribution, because these have no alpha or
    beta. If the band applies per response, such a token counts as clipped if its response is clipped.
    """
    tokens = max(logp.numel(), 1)
    learner, shadow, sampler = logp.double(), logp_shadow.double(), logp_sampler.double()
    infinite = torch.isinf(learner) | torch.isinf(shadow) | torch.isinf(sampler)
    alpha, beta = (shadow - sampler)[~infinite], (learner - shadow)[~infinite]
    advantage = segments.expand(advantages.double())[~infinite]
    count = beta.numel()
    inside, zero, off = max(count, 1), beta.new_zeros(()), beta.expm1().abs()
    centered, a_centered = beta - beta.sum() / inside, advantage - advantage.sum() / inside
    values = {
        "alpha_abs_mean": alpha.abs().sum() / inside,
        "beta_abs_mean": beta.abs().sum() / inside,
        "beta_abs_max": beta.abs().max() if count else zero,
        "beta_mean": beta.sum() / inside,
        "beta_std": beta.std() if count > 1 else zero,
        "ratio_off_10_frac": (off > 0.1).double().sum() / inside,
        "ratio_off_50_frac": (off > 0.5).double().sum() / inside,
        "outside_frac": infinite.double().sum() / tokens,
        "beta_advantage_mean": (beta * advantage).sum() / inside,
        "beta_advantage_corr": (centered * a_centered).sum() / (centered.norm() * a_centered.norm()),
        "varies": ((beta != beta[:1]).any() & (advantage != advantage[:1]).any()).double(),
    }
    values |= _by_log_prob(learner[~infinite], beta)
    phantom = None
    if band is not None:
        counts = clipped_tokens(log_ratio, logp_shadow, logp_sampler, advantages, segments, band)
        phantom = counts.phantom
        values |= {f"{name}_frac": mask.double().sum() / tokens for name, mask in counts._asdict().items()}
    if ends is not None:
        values["eos_frac"] = ends.double().sum() / tokens
        for name, part in (("eos", ends), ("rest", ~ends)):
            values |= _part(name, part, alpha, beta, infinite, phantom)
    found = dict(zip(values, torch.stack(list(values.values())).cpu().tolist(), strict=True))
    if not found.pop("varies"):
        del found["beta_advantage_corr"]
    if found["beta_abs_mean"]:
        found["snr"] = found["alpha_abs_mean"] / found["beta_abs_mean"]
    # a mean over no tokens is 0 / 0
    return {f"precision/{name}": v for name, v in found.items() if not (name.startswith(PARTS) and math.isnan(v))}


def _by_log_prob(logp: Tensor, beta: Tensor) -> dict[str, Tensor]:
    """Mean |beta| by the token's log-prob, (N,) each; NaN for a range without tokens."""
    found = {}
    for low, high in pairwise(LOG_PROBS):
        inside = (logp >= -low if math.isfinite(low) else logp < -high) & ((logp < -high) | (high == 0.0))
        found[f"beta_abs_logp_{low:g}_{high:g}"] = beta.abs().masked_fill(~inside, 0.0).sum() / inside.sum()
    return found


class Clipped(NamedTuple):
    """(T,) bool masks.

    clipped: outside the clip bounds under exp(alpha). phantom: outside under the objective's ratio but inside under
    exp(alpha). clipped_lost, phantom_lost: the same, restricted to tokens without gradient.
    """

    clipped: Tensor
    clipped_lost: Tensor
    phantom: Tensor
    phantom_lost: Tensor


def clipped_tokens(
    log_ratio: Tensor, logp_shadow: Tensor, logp_sampler: Tensor, advantages: Tensor, segments: Segments, band: Band
) -> Clipped:
    """Separate tokens clipped by the policy's change from tokens clipped by precision alone (TRL study, section 10.3).

    If the band applies per response, tokens outside the shadow's distribution count as unchanged, as in the objective.
    """
    alpha = band.comparable(finite_log_ratio(logp_shadow, logp_sampler))
    clipped = band.beyond(alpha, segments)
    phantom = band.beyond(log_ratio, segments) & ~clipped
    lost = band.outside(log_ratio, advantages, segments)
    return Clipped(clipped, band.outside(alpha, advantages, segments), phantom, phantom & lost)


def _part(
    name: str, part: Tensor, alpha: Tensor, beta: Tensor, infinite: Tensor, phantom: Tensor | None
) -> dict[str, Tensor]:
    """Average over the tokens of `part` (T,); NaN if it is empty. alpha, beta: values of the finite tokens only."""
    finite = part[~infinite].double()
    mean = (beta * finite).sum() / finite.sum()
    found = {
        f"{name}_alpha_abs_mean": (alpha.abs() * finite).sum() / finite.sum(),
        f"{name}_beta_abs_mean": (beta.abs() * finite).sum() / finite.sum(),
        f"{name}_beta_mean": mean,
        f"{name}_beta_std": ((beta - mean).square() * finite).sum().div(finite.sum()).sqrt(),
    }
    if phantom is not None:
        found[f"{name}_phantom_frac"] = (phantom & part).double().sum() / part.double().sum()
    return found


@torch.no_grad()
def deployed_metrics(
    shadow_before: Tensor,  # (T,) the sampler's arithmetic before the training step
    shadow_after: Tensor,  # (T,) and after it
    advantages: Tensor,  # (R,)
    segments: Segments,
) -> dict[str, float]:
    """Measure whether the step moved the deployed policy towards its advantages (TRL study, sections 6.5 and 7.7).

        deployed/improvement     mean over the tokens of sign(A) (q_after - q_before), nats
        deployed/delta_abs_mean  mean |q_after - q_before|, nats
        deployed/efficiency      improvement / delta_abs_mean, in [-1, 1]; omitted if nothing moved
        deployed/outside_frac    share of tokens outside the truncated distribution before or after, excluded
                                 from the means

    Tokens with A = 0 contribute to both means, with an improvement of 0: only other tokens' gradients move them.
    """
    before, after = shadow_before.double(), shadow_after.double()
    infinite = torch.isinf(before) | torch.isinf(after)
    moved = (after - before)[~infinite]
    tokens = max(moved.numel(), 1)
    improvement = (segments.expand(advantages.double().sign())[~infinite] * moved).sum() / tokens
    outside = infinite.double().sum() / max(infinite.numel(), 1)
    found = torch.stack([improvement, moved.abs().sum() / tokens, outside]).cpu().tolist()
    names = ("deployed/improvement", "deployed/delta_abs_mean", "deployed/outside_frac")
    metrics = dict(zip(names, found, strict=True))
    if found[1]:
        metrics["deployed/efficiency"] = found[0] / found[1]
    return metrics
