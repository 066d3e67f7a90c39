"""The proximal ratio of a surrogate: which probability of the token is compared with which.

`objective.ratio` names it (TRL precision study, section 9): the ratio decides which tokens are clipped and how much
each counts; the score, d logp, is always the learner's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from qarl.objectives.ratios import log_ratio, score

if TYPE_CHECKING:
    from torch import Tensor

    from qarl.objectives.tokens import TokenLogProbs

RatioKind = Literal["train", "rollout", "shadow", "one"]


def proximal_log_ratio(logps: TokenLogProbs, kind: RatioKind) -> Tensor:
    """log r per token, (T,), whose gradient is that of the learner's log-prob.

    train    l - o, learner now over learner at the rollout's snapshot (recompute mode, three policies)
    rollout  l - b, learner now over what the sampler reported (bypass mode, two policies)
    shadow   value q - b, the sampler's own arithmetic at the current weights; gradient of l
    one      value 0; gradient of l
    """
    if kind == "train":
        return log_ratio(logps.logp, logps.logp_old)
    if kind == "rollout":
        return log_ratio(logps.logp, logps.logp_sampler)
    if kind == "one":
        return score(logps.logp)
    assert kind == "shadow", f"unknown ratio {kind!r}"
    assert logps.logp_shadow is not None, "ratio shadow needs logp_shadow"
    return log_ratio(logps.logp_shadow, logps.logp_sampler).detach() + score(logps.logp)
