"""What a router says of each token, and what an expert that all tokens go through gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Routed:
    """Made by `qarl_kernels.moe.routing.route`; T tokens, E experts, k slots.

    logits: (T, E) float32. experts: (T, k) int32, those chosen, ascending. weights: (T, k) float32, what their results
    are multiplied by.
    """

    logits: Tensor
    experts: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Shared:
    """Of the shared expert, for T tokens. output: (T, H). gate: (T,) float32, what it is multiplied by."""

    output: Tensor
    gate: Tensor
