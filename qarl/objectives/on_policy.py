"""Policy gradient of one optimizer step a batch (an ablation of QaRL, figure 8): nothing has moved, so the ratio is 1.

J_t = A exp(l_t - stop(l_t))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from qarl.config.base import Fault, Field
from qarl.objectives.base import ObjectiveConfig
from qarl.objectives.surrogate import Surrogate
from qarl.objectives.token_clip import clipped
from qarl.objectives.tokens import SurrogateInputs

if TYPE_CHECKING:
    from qarl.config.config import Config


class OnPolicy(ObjectiveConfig):
    """The ratio is 1, with the gradient of the learner's log-prob."""

    name: Literal["on_policy"] = Field(
        "on_policy", description="Ratio 1 with the gradient of the log-prob; one optimizer step a batch."
    )

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """r A per token, (T,), to maximise, with r = 1 in value. Statistics are over tokens that are not pruned."""
        return clipped(inputs, None)

    def faults_in(self, config: Config) -> Iterator[Fault]:
        train, responses = config.train, config.responses_per_step
        if train.epochs != 1:
            yield Fault(("train", "epochs"), train.epochs, "on_policy takes one optimizer step a batch; must be 1")
        if config.minibatch_size != responses:
            text = f"on_policy takes one optimizer step a batch; leave null, or {responses}"
            yield Fault(("train", "minibatch_size"), train.minibatch_size, text)
