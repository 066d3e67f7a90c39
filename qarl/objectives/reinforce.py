"""REINFORCE (Williams 1992), the policy gradient without a ratio, and RLOO (Ahmadian et al. 2024).

    J_t = A l_t

The two differ in the advantage: rewards whitened over the batch, or minus the mean of the group's other responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qarl.inputs.section import Fault, Field
from qarl.objectives.base import AdvantageKey, AggregationKey, ObjectiveConfig
from qarl.objectives.common import Surrogate, SurrogateInputs


class Reinforce(ObjectiveConfig):
    """The policy gradient, with rewards whitened over the batch."""

    name: Literal["reinforce"] = Field(
        "reinforce", description="The policy gradient without a ratio, with batch-whitened rewards (Williams 1992)."
    )
    advantage: AdvantageKey = "reinforce"
    aggregation: AggregationKey = "seq-mean-token-sum"

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """Compute J per token, (T,). A token with an infinite log-prob has value 0 and no gradient."""
        logp = inputs.logps.logp
        return Surrogate(inputs.token_advantages * logp.masked_fill(logp.isinf(), 0.0))

    def one_ratio_per_response(self, level: str | None) -> bool:
        """Whether the estimator is over trajectories: yes, unless correction weights are per token."""
        return level != "token"


class RLOO(Reinforce):
    """The policy gradient, with leave-one-out advantages."""

    name: Literal["rloo"] = Field(  # type: ignore[assignment] # narrower than the class it extends
        "rloo", description="reinforce with leave-one-out advantages (Ahmadian et al. 2024)."
    )
    advantage: AdvantageKey = "rloo"

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.advantage != "rloo":
            yield self.fault("advantage", "rloo is reinforce with advantage rloo; leave null, or use reinforce")
