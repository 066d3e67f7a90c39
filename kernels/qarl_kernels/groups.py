"""A mixture of experts' tensors: the router's choices, the rows sorted by expert, the shared expert's result."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """The (token, slot) pairs of a batch, sorted by expert; pairs of one expert keep their order.

    T tokens with k experts each make R = T * k pairs; pair p is token * k + slot. Made by `qarl_kernels.moe.dispatch`.
    The host knows the shapes only.

    Attributes:
        experts: Number of experts, E.
        slots: Experts per token, k.
        order: (R,) int32, the pair of each sorted row.
        place: (R,) int32, the sorted row of each pair.
        starts: (E + 1,) int32, the first sorted row of each expert, and R.
    """

    experts: int
    slots: int
    order: Tensor
    place: Tensor
    starts: Tensor

    @property
    def rows(self) -> int:
        """R."""
        return self.order.shape[0]


@dataclass(frozen=True)
class Routed:
    """A router's choices for T tokens, E experts and k slots; made by `qarl_kernels.moe.routing.route`.

    Attributes:
        logits: (T, E) float32.
        experts: (T, k) int32, the chosen experts, ascending.
        weights: (T, k) float32, the factors of their results.
    """

    logits: Tensor
    experts: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Shared:
    """The result of the expert that all tokens go through, (T, H), and its gate, the factor of it, (T,) float32."""

    output: Tensor
    gate: Tensor
