"""Reduce-scatter of gradients in a fixed order, overlapped with the backward; each rank keeps its own rows.

A round is one micro-batch on every rank that has one left. When the gradients of a layer are complete, each rank sends
the other ranks their rows and receives its own rows while the backward computes the layer below. Gradients are summed
over ranks in rank order, then over rounds. The result is bitwise the same for any order of network messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from qarl_formats.rows import concatenate_rows
from torch import Tensor, nn

from qarl.distributed.exchange import Exchange
from qarl.distributed.rows import Block, RowPlan
from qarl.policy.policy import Policy

IN_FLIGHT = 2  # number of groups that are sent at the same time; each keeps its full gradients in memory


class Rounds(ABC):
    """Sends the gradients of each micro-batch, layer by layer, in the order in which the backward completes them.

    A group is the master weights whose gradients are sent together: those of a layer, of the output, of the embedding.

    Args:
        policy: The policy. Its master weights may be placeholders; their `.grad` is used only during `round`.
        blocks: Names of all master weights. The gradients of one block are concatenated along dimension 0 and sent as
            one tensor.
    """

    def __init__(self, policy: Policy, blocks: Iterable[Block]) -> None:
        self._device = policy.device
        self._names = {parameter: name for name, parameter in policy.named_parameters()}  # parameters hash by identity
        self._groups = backward_order(policy)
        block_of, named = {name: block for block in blocks for name in block}, dict(policy.named_parameters())
        self._blocks = [  # per group
            [
                (block, [named[name] for name in block])
                for block in dict.fromkeys(block_of[self._names[p]] for p in group)
            ]
            for group in self._groups
        ]
        self._norm, self._head = policy.decoder.norm.master, None if policy.tied else policy.head_master
        assert {p for group in self._groups for p in group} == self._names.keys(), "a master weight belongs to no group"
        assert len({b for group in self._blocks for b, _ in group}) == sum(map(len, self._blocks)), (
            "a block belongs to two groups"
        )
        # Number of groups sent in this round, parameters with a complete gradient, and whether a round is running.
        self._begun, self._complete, self._running = 0, set[nn.Parameter](), False
        policy.decoder.on_gradients = self._completed
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(lambda one: self._completed([one]))

    @abstractmethod
    def send(self, blocks: Sequence[Block], gradients: Sequence[Tensor]) -> None:
        """Send the gradients of one group in one round.

        Args:
            blocks: Blocks of the group.
            gradients: Full contiguous gradient per block. The callee owns them and may overwrite them.
        """

    @abstractmethod
    def settle(self) -> None:
        """Finish the round after all of its groups were sent."""

    @abstractmethod
    def abandon(self) -> None:
        """Release the state of a round. Called after every round, also after an exception."""

    def round(self, loss: Tensor | None) -> None:
        """Run the backward and send its gradients.

        Args:
            loss: Scalar loss of this rank's micro-batch. None if this rank has no micro-batch left: it sends zeros, in
                the same order as the other ranks.
        """
        assert all(master.grad is None for master in self._names), "the master weights already have gradients"
        self._begun, self._complete, self._running = 0, set(), True
        try:
            if loss is not None:
                loss.backward()
            while self._begun < len(self._groups):
                self._begin()
            self.settle()
        finally:
            self._running = False
            self.abandon()
            for master in self._names:
                master.grad = None

    def _completed(self, masters: Iterable[nn.Parameter]) -> None:
        """Send all groups that are complete now that the gradients of `masters` are."""
        if not self._running:
            return
        self._complete.update(masters)
        if self._head is not None and self._norm in self._complete:
            self._complete.add(self._head)  # the output layer's backward ends before that of the last norm begins
        while self._begun < len(self._groups) and self._complete.issuperset(self._groups[self._begun]):
            self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """Send the next group's gradients."""
        blocks = self._blocks[self._begun]
        self._begun += 1
        gradients = [self._take_gradient(masters) for _, masters in blocks]
        self.send([block for block, _ in blocks], gradients)

    def _take_gradient(self, masters: Sequence[nn.Parameter]) -> Tensor:
        """Concatenate and clear the gradients of a block; missing gradients count as zeros."""
        found = [master.grad for master in masters]
        if all(grad is None for grad in found):
            return torch.zeros(sum(map(len, masters)), *masters[0].shape[1:], device=self._device)
        whole = concatenate_rows(
            [
                torch.zeros(master.shape, device=self._device) if grad is None else grad.contiguous()
                for master, grad in zip(masters, found, strict=True)
            ]
        )
        for master in masters:
            master.grad = None
        return whole


class RowSums(Rounds):
    """Sums this rank's gradient rows over ranks and rounds."""

    def __init__(self, policy: Policy, plan: RowPlan, exchange: Exchange) -> None:
        super().__init__(policy, plan.blocks)
        self._plan, self._exchange = plan, exchange
        self._sums: dict[Block, Tensor] = {}
        self._rows = {block: [len(plan.cut(name)[exchange.rank]) for name in block] for block in plan.blocks}
        self._in_flight: deque[list[tuple[Block, Tensor, Callable[[], Tensor]]]] = deque()

    def take(self) -> dict[str, Tensor]:
        """Return the sums and reset them.

        Returns:
            This rank's rows (rows, ...) float32, by name; empty before the first round.
        """
        sums, self._sums = self._sums, {}
        return {
            name: rows
            for block, whole in sums.items()
            for name, rows in zip(block, whole.split(self._rows[block]), strict=True)
        }

    def send(self, blocks: Sequence[Block], gradients: Sequence[Tensor]) -> None:
        pending = self._exchange.begin_sums(gradients, [self._plan.block_cut(block) for block in blocks])
        self._in_flight.append(list(zip(blocks, gradients, pending, strict=True)))
        while len(self._in_flight) > IN_FLIGHT:
            self._add_oldest()

    def settle(self) -> None:
        while self._in_flight:
            self._add_oldest()

    def abandon(self) -> None:
        self._in_flight.clear()

    @torch.no_grad()
    def _add_oldest(self) -> None:
        """Wait for the oldest group in flight, and add its rows to the sums."""
        for block, _, pending in self._in_flight.popleft():
            rows, previous = pending(), self._sums.get(block)
            self._sums[block] = rows if previous is None else previous.add_(rows)


def backward_order(policy: Policy) -> list[list[nn.Parameter]]:
    """Group the master weights in the order in which the backward completes them, with or without fused kernels."""
    decoder = policy.decoder
    first = [decoder.norm.master] if policy.tied else [policy.head_master, decoder.norm.master]
    return [first, *(layer.parameters() for layer in reversed(decoder.layers)), [decoder.embedding]]
