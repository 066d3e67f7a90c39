"""SAPO, Soft Adaptive Policy Optimization (Gao et al. 2025): a smooth gate in place of the clip.

    J_t = f(r_t) A    f(r) = sigmoid(tau (r - 1)) 4 / tau    tau = sapo_tau_pos for A > 0, else sapo_tau_neg

The gradient decays smoothly for ratios far from 1 instead of vanishing at a bound. It decays faster for A < 0, which
has the larger temperature. f'(1) = 1, so the on-policy gradient is that of r A.
"""

from __future__ import annotations

from typing import Literal

from qarl.inputs.limits import FACTOR, SMALLEST_TEMPERATURE
from qarl.inputs.section import Field
from qarl.objectives.base import RatioObjective
from qarl.objectives.common import Surrogate, SurrogateInputs, clamped_exp, ratio_stats


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
        """Compute J per token, (T,). Statistics are over tokens that are not pruned."""
        ratio, clamped = clamped_exp(inputs.log_ratio)
        advantage = inputs.token_advantages
        tau = ratio.new_full(ratio.shape, self.sapo_tau_neg).masked_fill(advantage > 0, self.sapo_tau_pos)
        value = advantage * (tau * (ratio - 1.0)).sigmoid() * (4.0 / tau)
        never = clamped.new_zeros(clamped.shape)  # nothing is clipped
        return Surrogate(value, ratio_stats(ratio, never, clamped, inputs.counted_tokens))
