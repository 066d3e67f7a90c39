"""Which experts the tokens of a batch go through: what a forward is told of it, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from qarl_kernels.moe.balance import choices
from torch import Tensor

from qarl.experts import ExpertNames


@dataclass(frozen=True)
class Balance:
    """Router losses, whose gradient is added in the backward of the forward that they belong to.

    Both are means over `tokens`, times the loss scale: see `qarl_kernels.moe.balance`. The load-balancing loss is of
    all layers together, so its gradient in one layer needs the choices of the tokens in all layers: the forward counts
    them.

    Attributes:
        aux: Weight of the load-balancing loss.
        z: Weight of the z-loss of each layer.
        tokens: The rows that are counted, 1 or more.
        layers: Number of layers with experts.
        slots: (E,) float32, mean number of slots per token and layer of each expert in a larger batch; None: in these
            tokens, from `counts`.
        counts: (E,) float32 per layer, slots per token of each expert, filled by the forward if `slots` is None.
    """

    aux: float
    z: float
    tokens: slice
    layers: int
    slots: Tensor | None = None
    counts: dict[int, Tensor] = field(default_factory=dict)

    def count(self, layer: int, experts: Tensor, total: int) -> None:
        """Record the experts (T, k) of a layer, of `total` experts."""
        if self.slots is None:
            counted = experts[self.tokens]
            self.counts[layer] = choices(counted[:, None], total)[0].float() / len(counted)

    @cached_property
    def mean_slots(self) -> Tensor:
        """(E,) float32; first read by a backward, after the forward has counted all layers."""
        if self.slots is not None:
            return self.slots
        assert len(self.counts) == self.layers, f"{len(self.counts)} of {self.layers} layers were counted"
        return torch.stack([self.counts[layer] for layer in sorted(self.counts)]).mean(0)


@dataclass
class Routes:
    """Of one forward over T rows.

    replay: (T, L, k) integer, in place of the experts that the routers of the L layers with experts choose; a row whose
    first number is negative keeps its own. own: filled by the forward where it is not None: what each such layer would
    have chosen itself, by its number among them, (T, k) int32, ascending. balance: None: no such losses. rows: only so
    many, from the first one, are tokens of the batch; None: all. loads: filled where it is not None, see `measure`.
    repeated: so many of them, from the first one, are not measured: another forward has them too.
    """

    replay: Tensor | None = None
    own: dict[int, Tensor] | None = None
    balance: Balance | None = None
    rows: int | None = None
    loads: dict[int, Tensor] | None = None
    repeated: int = 0

    def of_layer(self, layer: int) -> Tensor | None:
        """What is replayed in one layer, by its number among those with experts: (T, k), or None."""
        return None if self.replay is None else self.replay[:, layer]

    def tell(self, layer: int, experts: Tensor) -> None:
        """Take note of a layer's own choice."""
        if self.own is not None:
            self.own[layer] = experts

    @torch.no_grad()
    def measure(self, layer: int, logits: Tensor, experts: Tensor) -> None:
        """Take note of what a layer's router does to the batch's rows. logits: (T, E) float32; experts: (T, k), those
        that the tokens go through.

        `loads[layer]`: (2, E + 1) float64: how often each expert is chosen, and the sum of its probability; behind them
        the sums of the distribution's entropy in nats and of the squared log-sum-exp of the logits.
        """
        if self.loads is None:
            return
        measured = slice(self.repeated, self.rows)
        wide = logits[measured].detach().double()
        log_sum = wide.logsumexp(-1, keepdim=True)
        probabilities = (wide - log_sum).exp()
        entropy = -torch.xlogy(probabilities, probabilities).sum()
        chosen = choices(experts[measured, None], wide.shape[1])[0].double()
        rows = (torch.cat((chosen, entropy[None])), torch.cat((probabilities.sum(0), log_sum.square().sum()[None])))
        self.loads[layer] = torch.stack(rows)

    def filled_up(self, rows: int, total: int) -> Routes:
        """Of a batch of `rows` rows filled up to `total`; the new ones choose for themselves, and nobody asks."""
        if total == rows or self is NO_ROUTES:
            return self
        self.rows = rows  # what is recorded of the whole is asked of this one
        replay = self.replay
        if replay is not None:
            replay = torch.cat((replay, replay.new_full((total - rows, *replay.shape[1:]), -1)))
        return replace(self, replay=replay, rows=rows)

    def recorded(self) -> Tensor:
        """The own choices of all layers: (T, L, k) int32."""
        assert self.own is not None, "nothing was recorded"
        return torch.stack([self.own[layer] for layer in sorted(self.own)], 1)[: self.rows]

    def measured(self) -> Tensor:
        """`loads` of all layers: (L, 2, E + 1) float64."""
        assert self.loads is not None, "nothing was measured"
        return torch.stack([self.loads[layer] for layer in sorted(self.loads)])


def recording() -> Routes:
    """Routes that take note of what the routers choose."""
    return Routes(own={})


NO_ROUTES = Routes()


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer. number: among the layers with experts. router: the name of its weight. count: E.
    per_token: k. normalize: whether the weights of a token's experts are divided by their sum. names: of modules.
    shared_gate: the name of the weight that says how much of the shared expert a token takes; None: there is none."""

    number: int
    router: str
    count: int
    per_token: int
    normalize: bool
    names: ExpertNames
    shared_gate: str | None = None

    @property
    def gates(self) -> list[str]:
        """The names of the weights that are no linear's."""
        return [self.router] if self.shared_gate is None else [self.router, self.shared_gate]
