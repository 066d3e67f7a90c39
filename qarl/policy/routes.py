"""Expert choices (routing) of the tokens of a batch: replayed or recorded by a forward, and stored in rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from qarl_kernels.moe.balance import choices
from torch import Tensor

from qarl.utils.expert_names import ExpertNames

UINT8_EXPERTS = 255  # experts 0 to 254; 255 marks an unknown token


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        number: Index of the layer among those with experts.
        router: Name of the router's weight.
        count: E, the number of experts.
        per_token: k, the experts of a token.
        normalize: Whether the weights of a token's experts are divided by their sum.
        names: Module names.
        shared_gate: Name of the weight of the shared expert's gate; None: there is no shared expert.
    """

    number: int
    router: str
    count: int
    per_token: int
    normalize: bool
    names: ExpertNames
    shared_gate: str | None = None

    @property
    def gates(self) -> list[str]:
        """Names of router and gate weights, which are not Linears."""
        return [self.router] if self.shared_gate is None else [self.router, self.shared_gate]


@dataclass(frozen=True)
class Balance:
    """Router losses of one forward, whose backward adds their gradient.

    Both are means over `tokens`, times the loss scale: see `qarl_kernels.moe.balance`. The load-balancing loss is
    computed over all layers together, so its gradient in one layer needs the choices of the tokens in all layers: the
    forward counts them. A slot is one of the k places of a token; it holds one expert.

    Attributes:
        aux: Weight of the load-balancing loss.
        z: Weight of the z-loss of each layer.
        tokens: Rows that count in the losses, at least one.
        layers: Number of layers with experts.
        slots: (E,) float32, mean number of slots per token and layer that each expert gets in a larger batch. None:
            computed from `counts`, for this forward alone.
        counts: Per layer (E,) float32, slots per token of each expert; filled by the forward if `slots` is None.
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
class RouterScores:
    """Router log-probs of k experts per layer, at the rows that predict the T response tokens of a forward.

    Attributes:
        experts: (T, L, k) integer, the experts to score; None: the chosen ones.
        rows: (T,) int64, row of the forward that predicts each token; set by `Policy`.
        found: (T, k) experts and their float32 log-probs per layer number; filled by the forward.
    """

    experts: Tensor | None = None
    rows: Tensor | None = None
    found: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, layer: int, logits: Tensor, chosen: Tensor) -> None:
        """Record a layer's scores, given its logits (rows, E) and the chosen experts (rows, k)."""
        assert self.rows is not None, "the rows that predict tokens are not known"
        experts = (chosen[self.rows] if self.experts is None else self.experts[:, layer]).long()
        self.found[layer] = experts, logits[self.rows].float().log_softmax(-1).gather(-1, experts)

    def packed(self) -> Tensor:
        """Return (T, 2 L k) float32: expert numbers of all layers (exact in float32), then their log-probs."""
        layers = [self.found[layer] for layer in sorted(self.found)]
        return torch.cat([torch.stack(values, 1).flatten(1).float() for values in zip(*layers, strict=True)], 1)

    def shift(self, old: Tensor) -> Tensor:
        """Log of the router-shift ratio, (T,): minus the mean over layers and experts of |log p - log p_old|.

        Args:
            old: (T, 2 L k), `packed` of a forward with the rollout's weights and the same experts.
        """
        new = self.packed()
        half = new.shape[1] // 2
        return -(new[:, half:] - old[:, half:]).abs().mean(1)


@dataclass
class Routes:
    """Routing of one forward over T rows and L layers with experts: choices to replay, and records to fill.

    Attributes:
        replay: (T, L, k) integer, taken instead of the routers' choices; a row with a negative first number keeps its
            own choice.
        own: The routers' own choices, (T, k) int32 ascending per layer number; filled by the forward unless None.
        balance: Router losses; None: there are none.
        rows: Number of leading rows that are tokens of the batch; None: all.
        loads: See `measure`; filled by the forward unless None.
        counted: Rows that `measure` counts; None: all. Another forward may count the rows of a shared prompt.
        scores: Log-probs of experts at the rows that predict tokens; filled by the forward unless None.
    """

    replay: Tensor | None = None
    own: dict[int, Tensor] | None = None
    balance: Balance | None = None
    rows: int | None = None
    loads: dict[int, Tensor] | None = None
    counted: slice | Tensor | None = None
    scores: RouterScores | None = None

    def of_layer(self, layer: int) -> Tensor | None:
        """Return the replayed experts (T, k) of a layer by its number; None without replay."""
        return None if self.replay is None else self.replay[:, layer]

    def record_choice(self, layer: int, experts: Tensor) -> None:
        """Record the experts (T, k) that a layer's router chose."""
        if self.own is not None:
            self.own[layer] = experts

    @torch.no_grad()
    def measure(self, layer: int, logits: Tensor, experts: Tensor) -> None:
        """Record the load of a layer's experts: `loads[layer]`, (2, E + 1) float64.

        Row 0 holds how often each expert is chosen, then the sum of the distributions' entropy in nats. Row 1 holds
        the sum of each expert's probability, then the sum of the squared log-sum-exp of the logits.

        Args:
            layer: Number of the layer.
            logits: (T, E) float32.
            experts: (T, k), the chosen experts.
        """
        if self.loads is None:
            return
        measured = slice(self.rows) if self.counted is None else self.counted
        wide = logits[measured].detach().double()
        log_sum = wide.logsumexp(-1, keepdim=True)
        probabilities = (wide - log_sum).exp()
        entropy = -torch.xlogy(probabilities, probabilities).sum()
        chosen = choices(experts[measured, None], wide.shape[1])[0].double()
        rows = (torch.cat((chosen, entropy[None])), torch.cat((probabilities.sum(0), log_sum.square().sum()[None])))
        self.loads[layer] = torch.stack(rows)

    def filled_up(self, rows: int, total: int) -> Routes:
        """Return the routes of a batch of `rows` rows padded to `total` rows. The padding is not replayed."""
        if total == rows or self is NO_ROUTES:
            return self
        self.rows = rows  # `recorded` is called on this object
        replay = self.replay
        if replay is not None:
            replay = torch.cat((replay, replay.new_full((total - rows, *replay.shape[1:]), -1)))
        return replace(self, replay=replay, rows=rows)

    def recorded(self) -> Tensor:
        """Return the routers' choices of all layers: (T, L, k) int32."""
        assert self.own is not None, "nothing was recorded"
        return torch.stack([self.own[layer] for layer in sorted(self.own)], 1)[: self.rows]

    def measured(self) -> Tensor:
        """`loads` of all layers: (L, 2, E + 1) float64."""
        assert self.loads is not None, "nothing was measured"
        return torch.stack([self.loads[layer] for layer in sorted(self.loads)])


def recording() -> Routes:
    """Routes that record the routers' choices."""
    return Routes(own={})


NO_ROUTES = Routes()


# --- as rollouts store them ------------------------------------------------------------------------------------


def stored_dtype(experts: int) -> torch.dtype:
    """uint8 for up to 255 experts per layer, else int16."""
    return torch.uint8 if experts <= UINT8_EXPERTS else torch.int16


def stored(numbers: Tensor, experts: int) -> Tensor:
    """Convert expert numbers (T, L, k) of any integer dtype to `Rollout.routing`, on their device.

    The k experts of a layer are ascending. An unknown token has negative numbers in all layers, stored with all bits
    set: 255 in uint8, -1 in int16. experts: Number of experts per layer.
    """
    return numbers.to(torch.int16).to(stored_dtype(experts))


def numbers_of(routing: Tensor) -> Tensor:
    """Inverse of `stored`: int16 (T, L, k) with -1 for unknown tokens, for `Routes.replay`."""
    if routing.dtype == torch.int16:
        return routing
    wide = routing.to(torch.int16)
    return wide.masked_fill_(wide == UINT8_EXPERTS, -1)


def unknown(tokens: int, like: Tensor) -> Tensor:
    """Return (tokens, L, k) of unknown tokens, with the dtype and layers of `like` (T, L, k)."""
    mark = UINT8_EXPERTS if like.dtype == torch.uint8 else -1
    return like.new_full((tokens, *like.shape[1:]), mark)
