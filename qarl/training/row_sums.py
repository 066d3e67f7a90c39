"""Gradients of several ranks, added up in a fixed order while the backward goes on, each rank keeping its own rows.

A round is one micro-batch on every rank that has one left. As soon as a layer's gradients are complete the rows of the
others leave for them, and while the layer before it is computed theirs arrive. The sum of a round is over ranks, in
their order, and that of an optimizer step over rounds: the same bits whatever the network does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from qarl.distributed.exchange import Exchange, Pending
from qarl.distributed.rows import RowPlan
from qarl.policy.policy import Policy

IN_FLIGHT = 2  # groups whose sums are under way, and whose gradients are whole


class Rounds(ABC):
    """Gradients of one micro-batch after the other, sent on in the order in which a backward completes them.

    policy: its masters may be handles; their `.grad` is used in a `round` alone.
    """

    def __init__(self, policy: Policy) -> None:
        self._device = policy.device
        self._names = {parameter: name for name, parameter in policy.named_parameters()}  # a hash is its identity
        self._groups = backward_order(policy)
        self._norm, self._head = policy.decoder.norm.weight, None if policy.tied else policy.head_master
        assert {p for group in self._groups for p in group} == self._names.keys(), "a master in no group"
        self._begun, self._complete, self._running = 0, set[nn.Parameter](), False
        policy.decoder.on_gradients = self._completed
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(lambda one: self._completed([one]))

    @abstractmethod
    def send(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """A group's gradients of one round, whole and contiguous, which are the receiver's from now on."""

    @abstractmethod
    def settle(self) -> None:
        """All groups of a round were sent."""

    @abstractmethod
    def abandon(self) -> None:
        """The round is over, with an exception or without."""

    def round(self, loss: Tensor | None) -> None:
        """Send the gradient of a loss; None: this rank has none, and sends zeros in the others' order."""
        assert all(master.grad is None for master in self._names), "somebody else uses the masters' gradients"
        self._begun, self._complete, self._running = 0, set(), True
        try:
            if loss is not None:
                loss.backward()
            for group in self._groups[self._begun :]:
                self._begin(group)
            self.settle()
        finally:
            self._running = False
            self.abandon()
            for master in self._names:
                master.grad = None

    @torch.no_grad()
    def _completed(self, masters: Iterable[nn.Parameter]) -> None:
        if not self._running:
            return
        self._complete.update(masters)
        if self._head is not None and self._norm in self._complete:
            self._complete.add(self._head)  # the output layer's backward is over before the last norm's begins
        while self._begun < len(self._groups) and self._complete.issuperset(self._groups[self._begun]):
            self._begin(self._groups[self._begun])

    @torch.no_grad()
    def _begin(self, group: Sequence[nn.Parameter]) -> None:
        self._begun += 1
        gradients = []
        for master in group:
            whole = torch.zeros(master.shape, device=self._device) if master.grad is None else master.grad
            gradients.append(whole.contiguous())
            master.grad = None
        self.send([self._names[master] for master in group], gradients)


class RowSums(Rounds):
    """The gradient's rows of one rank."""

    def __init__(self, policy: Policy, plan: RowPlan, exchange: Exchange) -> None:
        super().__init__(policy)
        self._plan, self._exchange = plan, exchange
        self._sums: dict[str, Tensor] = {}
        self._flight: deque[list[tuple[str, Tensor, Pending]]] = deque()

    def take(self) -> dict[str, Tensor]:
        """The sums by name, (rows, ...) float32; none before the first round. They are forgotten here."""
        sums, self._sums = self._sums, {}
        return sums

    def send(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        pending = self._exchange.begin_sums(gradients, [self._plan.cut(name) for name in names])
        self._flight.append(list(zip(names, gradients, pending, strict=True)))
        while len(self._flight) > IN_FLIGHT:
            self._land()

    def settle(self) -> None:
        while self._flight:
            self._land()

    def abandon(self) -> None:
        self._flight.clear()

    @torch.no_grad()
    def _land(self) -> None:
        for name, _, pending in self._flight.popleft():
            rows, held = pending.rows(), self._sums.get(name)
            self._sums[name] = rows if held is None else held.add_(rows)


def backward_order(policy: Policy) -> list[list[nn.Parameter]]:
    """The masters in groups that a backward completes one after the other, whichever forward was fused."""
    decoder, named = policy.decoder, dict(policy.named_parameters())
    first = [decoder.norm.weight] if policy.tied else [policy.head_master, decoder.norm.weight]
    return [first, *(layer.parameters() for layer in reversed(decoder.layers)), [named[decoder.embedding_name]]]
