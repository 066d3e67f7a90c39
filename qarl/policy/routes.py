"""Which experts the tokens of a batch go through: what a forward is told of it, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.experts import ExpertNames


@dataclass(frozen=True)
class Balance:
    """Losses of the routers, whose gradient is added to that of the forward they belong to.

    aux: weight of the load-balancing loss, E * sum over experts of (share of the tokens' choices that are the expert) *
    (its mean probability). z: weight of the mean square of the logits' log-sum-exp. Both are means over the layers'
    tokens, times the loss scale. tokens: only so many rows of the batch, from the first one, are real.
    """

    aux: float
    z: float
    tokens: int


@dataclass
class Routes:
    """Of one forward over T rows.

    replay: (T, L, k) integer, in place of the experts that the routers of the L layers with experts choose; a row whose
    first number is negative keeps its own. own: filled by the forward where it is not None: what each such layer would
    have chosen itself, by its number among them, (T, k) int32, ascending. balance: None: no such losses.
    """

    replay: Tensor | None = None
    own: dict[int, Tensor] | None = None
    balance: Balance | None = None

    def of_layer(self, layer: int) -> Tensor | None:
        """What is replayed in one layer, by its number among those with experts: (T, k), or None."""
        return None if self.replay is None else self.replay[:, layer]

    def tell(self, layer: int, experts: Tensor) -> None:
        """Take note of a layer's own choice."""
        if self.own is not None:
            self.own[layer] = experts

    def recorded(self) -> Tensor:
        """The own choices of all layers: (T, L, k) int32."""
        assert self.own is not None, "nothing was recorded"
        return torch.stack([self.own[layer] for layer in sorted(self.own)], 1)


def recording() -> Routes:
    """Routes that take note of what the routers choose."""
    return Routes(own={})


NO_ROUTES = Routes()


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer. number: among the layers with experts. router: the name of its weight. count: E.
    per_token: k. normalize: whether the weights of a token's experts are divided by their sum. names: of modules."""

    number: int
    router: str
    count: int
    per_token: int
    normalize: bool
    names: ExpertNames
