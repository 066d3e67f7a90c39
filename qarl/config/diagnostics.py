"""Measurements beside the training itself that cost additional forwards and backwards."""

from __future__ import annotations

from typing import Literal

from qarl.config.base import Field, Section
from qarl.config.limits import STEPS, TOKENS

Costly = Literal["shadow", "deployed", "crossings", "gradients", "backward", "routing"]
COSTLY: tuple[Costly, ...] = ("shadow", "deployed", "crossings", "gradients", "backward", "routing")


class DiagnosticsConfig(Section):
    """Costly diagnostics: due at every so many steps; 0 is off. None of them changes the run."""

    shadow_every: int = Field(
        0,
        ge=0,
        le=STEPS,
        description="precision/*: what the learner's precision alone does to the ratios; a shadow forward (the "
        "sampler's arithmetic at the learner's weights) for every training forward.",
    )
    deployed_every: int = Field(
        0,
        ge=0,
        le=STEPS,
        description="deployed/*: whether the step moved the served policy towards its advantages; a shadow forward "
        "over the step's responses before and after it.",
    )
    crossings_every: int = Field(0, ge=0, le=STEPS, description="Changed codes (or 16-bit values) of each layer.")
    gradients_every: int = Field(
        0,
        ge=0,
        le=STEPS,
        description="gradients/*: four backwards over the step's first minibatch, with the ratio and the score of "
        "learner and shadow, up to two with what either ratio clips, and two that compare the gradient that trains "
        "with REINFORCE; up to five more gradients in host memory.",
    )
    backward_every: int = Field(
        0,
        ge=0,
        le=STEPS,
        description="backward/*: what quant.backward: fp8 does to the gradient, in use or not; the step's first "
        "minibatch forwards and backwards twice, with 16-bit and with FP8 products; one more gradient in host memory. "
        "For the Triton kernels of a GPU of compute capability 8.9 or later.",
    )
    routing_every: int = Field(
        0,
        ge=0,
        le=STEPS,
        description="mismatch/routing_*: how often sampler and learner choose other experts for a token, of a mixture "
        "of experts; the sampler records its choice, a byte for each token, layer and chosen expert.",
    )
    tokens: int = Field(
        2000, ge=1, le=TOKENS, description="Tokens of a step that diagnostics/NNNNNN.json keeps for plots."
    )

    def due(self, step: int) -> frozenset[Costly]:
        """The costly diagnostics of training step `step`, counted from 1 as in metrics.jsonl."""
        every = {name: getattr(self, f"{name}_every") for name in COSTLY}
        return frozenset(name for name, steps in every.items() if steps and step % steps == 0)
