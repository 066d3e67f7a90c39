"""What an objective sees of the sampled tokens, and what it asks of the learner to see it.

Log-probs are natural, of the sampled token, under the sampling temperature and truncation. -inf is a token that the
truncated distribution does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probs of sampled tokens, packed, (T,) float32 each.

    logp: learner now, with gradient.
    logp_old: learner at the rollout's snapshot.
    logp_sampler: as the sampler reported when it drew the token.
    logp_shadow: the sampler's arithmetic at the current weights, no gradient.
    logp_ref: reference policy, no gradient.
    entropy: of the learner's distribution at the token, with gradient where `Needs.entropy`.
    """

    logp: Tensor
    logp_old: Tensor
    logp_sampler: Tensor
    logp_shadow: Tensor | None = None
    logp_ref: Tensor | None = None
    entropy: Tensor | None = None


class Needs(NamedTuple):
    """What an objective wants from the learner beside the three log-probs that are always there.

    shadow: logp_shadow (objective.ratio shadow). reference: logp_ref (objective.kl_coef > 0).
    entropy: entropy with gradient (objective.entropy_coef > 0). minibatch: `Constants` over the whole minibatch before
    its first backward (objective.loss detach_center, correction.normalize).
    """

    shadow: bool = False
    reference: bool = False
    entropy: bool = False
    minibatch: bool = False


class Constants(NamedTuple):
    """Numbers of a whole minibatch that each of its micro-batches needs.

    center: mean over the minibatch's tokens of what detach_center centres.
    weight_mean: mean correction weight, which correction.normalize divides by.
    """

    center: float = 0.0
    weight_mean: float = 1.0
