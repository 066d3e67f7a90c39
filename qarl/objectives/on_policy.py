"""Policy gradient with one optimizer step per batch (an ablation of QaRL, figure 8): the ratio is 1.

J_t = A exp(l_t - stop(l_t))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qarl.inputs.section import Fault, Field
from qarl.objectives.base import ObjectiveConfig, RunConfig
from qarl.objectives.common import Surrogate, SurrogateInputs, clamped_exp, ratio_stats, stat


class OnPolicy(ObjectiveConfig):
    """The ratio is 1, with the gradient of the learner's log-prob."""

    name: Literal["on_policy"] = Field(
        "on_policy", description="Ratio 1 with the gradient of the log-prob; one optimizer step per batch."
    )

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """Compute J per token, (T,). Statistics are over tokens that are not pruned."""
        ratio, clamped = clamped_exp(inputs.log_ratio)  # log_ratio = l - stop(l)
        value, counted = inputs.token_advantages * ratio, inputs.counted_tokens
        stats = ratio_stats(ratio, clamped.new_zeros(clamped.shape), clamped, counted)
        return Surrogate(value, stats | {"policy/mu_w": stat(value, counted)})

    def faults_in(self, config: RunConfig) -> Iterator[Fault]:
        train, responses = config.train, config.responses_per_step
        if train.epochs != 1:
            yield config.fault("train.epochs", "on_policy takes one optimizer step per batch; must be 1")
        if config.minibatch_size != responses:
            text = f"on_policy takes one optimizer step per batch; leave null, or {responses}"
            yield config.fault("train.minibatch_size", text)
