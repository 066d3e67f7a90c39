"""REINFORCE (Williams 1992): the policy gradient itself, without a ratio.

J_t = A l_t
"""

from __future__ import annotations

from typing import Literal

from qarl.config.base import Field
from qarl.objectives.base import AdvantageKey, AggregationKey, ObjectiveConfig
from qarl.objectives.surrogate import Surrogate
from qarl.objectives.tokens import SurrogateInputs


class Reinforce(ObjectiveConfig):
    """The policy gradient, with rewards whitened over the batch."""

    name: Literal["reinforce"] = Field(
        "reinforce", description="The policy gradient, without a ratio, of batch-whitened rewards (Williams 1992)."
    )
    advantage: AdvantageKey = "reinforce"
    aggregation: AggregationKey = "seq-mean-token-sum"

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """A l_t per token, (T,), to maximise. A token of infinite log-prob has value 0 and no gradient."""
        logp = inputs.logps.logp
        return Surrogate(inputs.token_advantages * logp.masked_fill(logp.isinf(), 0.0))

    def one_ratio_per_response(self, level: str | None) -> bool:
        """Without a weight this is the paper's estimator, over trajectories. A weight per token makes it per token."""
        return level != "token"
