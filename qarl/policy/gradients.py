"""Where gradients add up: float32 sums over the backwards of one optimizer step, held by an object of their own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class GradientAccumulator:
    """Sums the masters' gradients over the micro-batches of an optimizer step.

    `.grad` of the masters is the accumulator's during a `backward` alone, where layers of Triton kernels add to it
    themselves and autograd adds what the others give. Before and after it holds what it held, until `deliver` puts the
    sums there for an optimizer: so a diagnostic's backwards leave the learner's sums alone.

    masters: float32 leaves. loss_scale: every gradient that comes is of a loss times this; `deliver` divides it out.
    """

    def __init__(self, masters: Iterable[nn.Parameter], loss_scale: float = 1.0) -> None:
        self.loss_scale = loss_scale
        self._masters = list(masters)
        self._sums: dict[nn.Parameter, Tensor] = {}  # a tensor's hash is its identity

    def backward(self, output: Tensor, gradient: Tensor | None = None) -> None:
        """Add the gradient of `output`, a scalar loss, or any tensor with `gradient` of its shape arriving at it."""
        theirs = [master.grad for master in self._masters]
        for master in self._masters:
            master.grad = self._sums.get(master)
        try:
            output.backward(gradient)
        finally:
            for master, before in zip(self._masters, theirs, strict=True):
                if master.grad is not None:
                    self._sums[master] = master.grad
                master.grad = before

    def peek(self) -> list[Tensor | None]:
        """The sums of all masters, in their order and still times `loss_scale`; None for one that nothing came to."""
        return [self._sums.get(master) for master in self._masters]

    def take(self) -> list[Tensor | None]:
        """`peek`, and the accumulator is empty afterwards."""
        sums = self.peek()
        self._sums = {}
        return sums

    @torch.no_grad()
    def deliver(self) -> None:
        """Put the sums into `.grad` of the masters, without the loss scale; the accumulator is empty afterwards."""
        totals = self.take()
        if self.loss_scale != 1.0 and (scaled := [total for total in totals if total is not None]):
            torch._foreach_div_(scaled, self.loss_scale)
        for master, total in zip(self._masters, totals, strict=True):
            master.grad = total

    def clear(self) -> None:
        """Drop what is there."""
        self._sums = {}
