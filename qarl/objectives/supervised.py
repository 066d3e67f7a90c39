"""Objectives without rewards: supervised fine-tuning and distillation.

    sft        J_t = l_t                    l: learner's log-prob of the given token
    distill    J_t = -coef D_t              D: divergence from the teacher (`qarl.objectives.teacher`)

Both average over the tokens of a minibatch by default, as TRL's SFTTrainer and GKDTrainer do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from qarl.inputs.section import Fault, Field
from qarl.objectives.base import AdvantageKey, AggregationKey, ObjectiveConfig, RunConfig
from qarl.objectives.common import Surrogate, SurrogateInputs, stat


class Supervised(ObjectiveConfig):
    """Base of objectives without rewards."""

    advantage: AdvantageKey = "reinforce"
    aggregation: AggregationKey = "token-mean"
    rewarded: ClassVar[bool] = False

    def faults_in(self, config: RunConfig) -> Iterator[Fault]:
        if config.correction.active:
            yield config.fault("correction", f"{self.name} has no importance ratio to correct; leave the section out")
        if config.truncated or config.rollout.temperature != 1.0:
            text = f"{self.name} learns the model's own distribution; leave temperature, top_p, top_k and min_p out"
            yield config.fault("rollout.temperature", text)


class SFT(Supervised):
    """Supervised fine-tuning: the log-prob of given responses."""

    name: Literal["sft"] = Field("sft", description="Log-prob of given responses (supervised fine-tuning).")

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """Compute J per token, (T,). `sft/loss` is its mean over tokens, in nats, with the sign of a loss."""
        logp = inputs.logps.logp
        return Surrogate(inputs.token_advantages * logp, {"sft/loss": stat(-logp, inputs.counted_tokens)})

    def faults_in(self, config: RunConfig) -> Iterator[Fault]:
        yield from super().faults_in(config)
        if config.rollout.engine != "data":
            text = "sft learns from given responses; use data, or leave it out"
            yield config.fault("rollout.engine", text)


class Distill(Supervised):
    """Distillation: only the divergence from `teacher`, on given or on sampled responses."""

    name: Literal["distill"] = Field("distill", description="Divergence from objective.teacher alone (distillation).")

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """Return zeros (T,): the teacher's term is added by the objective."""
        return Surrogate(inputs.logps.logp.new_zeros(inputs.logps.logp.shape))

    def faults_in(self, config: RunConfig) -> Iterator[Fault]:
        yield from super().faults_in(config)
        if self.teacher is None:
            text = "distill needs a teacher; set {path: MODEL}, usually the 16-bit model that the student starts from"
            yield config.fault("objective.teacher", text)
        elif self.teacher.coef == 0:
            yield config.fault("objective.teacher.coef", "distill has no other term; must be above 0")
