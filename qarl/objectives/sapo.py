"""SAPO, Soft Adaptive Policy Optimization (Gao et al. 2025): a smooth gate in place of the clip.

Ratios far from 1 fade out instead of losing their gradient at an edge, faster for A < 0 with the larger temperature.
"""

from __future__ import annotations

from typing import Literal

from qarl.config.base import Field
from qarl.config.limits import FACTOR, SMALLEST_TEMPERATURE
from qarl.objectives.base import RatioObjective
from qarl.objectives.ratios import clamped_exp
from qarl.objectives.surrogate import Surrogate, ratio_stats
from qarl.objectives.tokens import SurrogateInputs


class SAPO(RatioObjective):
    """Soft Adaptive Policy Optimization."""

    name: Literal["sapo"] = Field("sapo", description="A smooth gate in place of the clip (Gao et al. 2025).")
    sapo_tau_pos: float = Field(
        1.0, ge=SMALLEST_TEMPERATURE, le=FACTOR, description="A > 0: temperature of the gate (default 1)."
    )
    sapo_tau_neg: float = Field(
        1.05, ge=SMALLEST_TEMPERATURE, le=FACTOR, description="A < 0: temperature of the gate (default 1.05)."
    )

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """f(r) A per token, (T,), to maximise, with f(r) = sigmoid(tau (r - 1)) * 4 / tau.

        tau is sapo_tau_pos for A > 0 and sapo_tau_neg else. f'(1) = 1, so on policy the gradient is that of r A.
        Statistics are over tokens that are not pruned.
        """
        ratio, clamped = clamped_exp(inputs.log_ratio)
        advantage = inputs.token_advantages
        tau = ratio.new_full(ratio.shape, self.sapo_tau_neg).masked_fill(advantage > 0, self.sapo_tau_pos)
        value = advantage * (tau * (ratio - 1.0)).sigmoid() * (4.0 / tau)
        return Surrogate(value, ratio_stats(ratio, clamped.new_zeros(clamped.shape), clamped, inputs.counted_tokens))
