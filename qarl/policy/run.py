"""What all layers of one forward and its backward share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from qarl.policy.attention import Attention
from qarl.policy.linear import Backward, WeightSet
from qarl.policy.routes import Routes
from qarl.policy.trace import Note

Recompute = Literal["elementwise", "mlp", "products", "layer"]


@dataclass(frozen=True)
class Run:
    """Inputs shared by all layers of one forward and its backward.

    Attributes:
        weights: Weight set of the version that runs.
        attention: Attention over the batch's own keys or a KV cache.
        routes: Routing of the tokens to experts.
        cos, sin: (positions, D); in plain torch (T, D), the position of each row.
        note: Records the result of each operation, see `qarl.policy.trace`.
        backward: See `OutputGradient`.
    """

    weights: WeightSet
    attention: Attention
    routes: Routes
    cos: Tensor
    sin: Tensor
    note: Note
    backward: Backward

    def noted(self, index: int, operation: str, tensor: Tensor) -> Tensor:
        """Record a tensor, and return it."""
        self.note(index, operation, tensor)
        return tensor
