"""The teacher of an objective: a frozen policy whose next-token distribution the learner approximates.

J_t = J_t(objective) - coef D_t, with the divergence D_t of `qarl_kernels.divergence` at each response token.

`qarl distill` uses the divergence alone. Beside an RL objective it is a regularizer, like `kl_coef`, but over the whole
vocabulary and with a policy of the user's choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qarl.inputs.limits import FACTOR, SMALLEST_TEMPERATURE, TEMPERATURE, VOCABULARY
from qarl.inputs.section import Fault, Field, PathName, Section


class TeacherConfig(Section):
    """A teacher and the divergence from it."""

    path: PathName = Field(
        description="Model directory, hub name, package:NAME, run or checkpoint of a run; usually the 16-bit parent. "
        "It must have the student's vocabulary.",
    )
    coef: float = Field(1.0, ge=0, le=FACTOR, description="Weight of the divergence.")
    loss: Literal["forward_kl", "reverse_kl", "jsd"] | None = Field(
        None,
        description="forward_kl: KL(teacher || student); reverse_kl: KL(student || teacher); jsd: generalized "
        "Jensen-Shannon divergence (GKD). null: forward_kl for given responses, reverse_kl for sampled ones.",
    )
    beta: float = Field(0.5, gt=0, lt=1, description="Weight of the teacher in the mixture of jsd.")
    temperature: float = Field(
        1.0,
        ge=SMALLEST_TEMPERATURE,
        le=TEMPERATURE,
        description="Divides the logits of both. It does not scale the loss.",
    )
    top_k: int = Field(
        0,
        ge=0,
        le=VOCABULARY,
        description="Use the teacher's k most probable tokens only, renormalized; the student's distribution keeps all "
        "tokens (forward_kl). 0: all.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Compute dtype of a teacher that is a model; a run has its own."
    )

    def faults(self) -> Iterator[Fault]:
        if self.top_k and self.loss in ("reverse_kl", "jsd"):
            text = f"{self.loss} needs the teacher's probability of every token; must be 0, or use forward_kl"
            yield self.fault("top_k", text)
