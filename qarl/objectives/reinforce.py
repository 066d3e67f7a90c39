"""REINFORCE (Williams 1992): the policy gradient itself, without a ratio.

J_t = A l_t
"""

from __future__ import annotations

from typing import Literal

from qarl.config.base import Field
from qarl.objectives.base import AdvantageKey, AggregationKey, ObjectiveConfig, PruningLevel
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

    def default_pruning(self, level: str | None) -> PruningLevel:
        """Without a weight the estimator is the paper's, over trajectories, and with one it is the weight's."""
        return "token" if level == "token" else "response"
