"""What an objective sees of the sampled tokens, and what it asks of the learner to see it.

Log-probs are natural, of the sampled token, under the sampling temperature and truncation. -inf is a token that the
truncated distribution does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from qarl.objectives.segments import Segments


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


class Pruned(NamedTuple):
    """Masks of what has weight 0 because of tokens outside the learner's truncated distribution.

    Attributes:
        tokens: bool (T,), tokens with weight 0.
        responses: bool (R,), responses dropped as a whole because of one of their tokens.
        outside: bool (T,), tokens outside the distribution; a subset of `tokens`.
    """

    tokens: Tensor
    responses: Tensor
    outside: Tensor


@dataclass(frozen=True)
class SurrogateInputs:
    """What an objective is given of a micro-batch: T tokens of R responses, packed end to end.

    logps: log-probs of the tokens. What is pruned is equal in every column there, so that its ratio is 1.
    log_ratio: (T,) log of the ratio that `objective.ratio` names, with the gradient of `logps.logp`; zeros in value
    where the objective has no ratio.
    advantages: (R,). segments: which token is of which response.
    pruned: tokens outside the learner's truncated distribution, whose value counts 0 whatever it is; None is none.
    center: `ObjectiveConfig.center` of the minibatch, 0 where nothing is centred.
    """

    logps: TokenLogProbs
    log_ratio: Tensor
    advantages: Tensor
    segments: Segments
    pruned: Pruned | None = None
    center: float = 0.0

    @property
    def token_advantages(self) -> Tensor:
        """(T,): of each token, the advantage of its response."""
        return self.segments.expand(self.advantages)

    @property
    def counted_tokens(self) -> Tensor | None:
        """bool (T,): tokens that enter statistics, those that are not pruned; None is every token."""
        return None if self.pruned is None else ~self.pruned.tokens

    @property
    def counted_responses(self) -> Tensor:
        """bool (R,): responses that enter statistics, not empty and not pruned."""
        present = self.segments.lengths > 0
        return present if self.pruned is None else present & ~self.pruned.responses


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
