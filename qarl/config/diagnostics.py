"""The `diagnostics` section: measurements that cost additional forwards and backwards."""

from typing import Annotated, Literal, get_args

from qarl.inputs.limits import STEPS, TOKENS
from qarl.inputs.section import Field, Section

Costly = Literal["shadow", "deployed", "reference", "crossings", "gradients", "backward", "routing"]
COSTLY: tuple[Costly, ...] = get_args(Costly)
Every = Annotated[int, Field(ge=0, le=STEPS)]


class DiagnosticsConfig(Section):
    """Costly diagnostics. Each key is an interval in training steps; 0 is off. None of them changes the run."""

    shadow_every: Every = Field(
        0,
        description="precision/*: effect of the learner's precision alone on the ratios. Costs one shadow forward per "
        "training forward, or nothing for an aligned learner.",
    )
    deployed_every: Every = Field(
        0,
        description="deployed/*: whether the step moved the served policy along the advantages. Costs two "
        "forwards over the step's responses, or one for an aligned learner.",
    )
    reference_every: Every = Field(
        0,
        description="policy/kl_ref: KL of the learner from the initial policy, as with objective.kl_coef but without a "
        "penalty. Costs a forward over the step's responses, and the memory of the initial policy.",
    )
    crossings_every: Every = Field(
        0,
        description="Code flips: number of codes (or 16-bit values) per layer that a step changed. Costs a pass over "
        "the weights.",
    )
    gradients_every: Every = Field(
        0,
        description="gradients/*: gradient error due to precision. Costs six to eight backwards over the first "
        "minibatch, and up to five gradients in host memory.",
    )
    backward_every: Every = Field(
        0,
        description="backward/*: gradient error of quant.backward: fp8, in use or not. Costs two forwards and "
        "backwards over the first minibatch. Requires a GPU of compute capability 8.9 or later.",
    )
    routing_every: Every = Field(
        0,
        description="mismatch/routing_*: how often sampler and learner choose different experts. The sampler "
        "sends one byte per token, layer and chosen expert.",
    )
    tokens: int = Field(
        2000, ge=1, le=TOKENS, description="Tokens per step that diagnostics/NNNNNN.json keeps for plots."
    )

    def due(self, step: int) -> frozenset[Costly]:
        """The costly diagnostics of training step `step`, counted from 1 as in metrics.jsonl."""
        every = {name: getattr(self, f"{name}_every") for name in COSTLY}
        return frozenset(name for name, steps in every.items() if steps and step % steps == 0)
