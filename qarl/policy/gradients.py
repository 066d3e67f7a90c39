"""Where gradients add up: float32 sums over the backwards of one optimizer step, held by an object of their own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from qarl_kernels.backward import weight_grad
from torch import Tensor, nn

from qarl.policy.view import Role


class GradientAccumulator:
    """Sums the masters' gradients over the micro-batches of an optimizer step.

    In `backward` the straight-through layers hand it the two factors of their weight gradient instead of a matrix
    (`add_product`): from the second micro-batch on their product is added to the sum at once, which saves a float32
    matrix of the weight's size and a pass over two of them. What other layers give, autograd adds to the same sums.
    `.grad` of the masters is the accumulator's during a `backward` alone: before and after it holds what it held, until
    `deliver` puts the sums there for an optimizer. Tensor hooks on a master see nothing of an `add_product`.

    role: the policy's, through which its layers find the accumulator that is at work. masters: float32 leaves, those of
    the policy's layers. loss_scale: every gradient that comes is of a loss times this; `deliver` divides it out.
    """

    def __init__(self, role: Role, masters: Iterable[nn.Parameter], loss_scale: float = 1.0) -> None:
        self._role, self.loss_scale = role, loss_scale
        self._masters = list(masters)
        self._known = set(self._masters)  # a tensor's hash is its identity
        self._sums: dict[nn.Parameter, Tensor] = {}

    def backward(self, output: Tensor, gradient: Tensor | None = None) -> None:
        """Add the gradient of `output`, a scalar loss, or any tensor with `gradient` of its shape arriving at it."""
        theirs = [master.grad for master in self._masters]
        for master in self._masters:
            master.grad = self._sums.get(master)
        outer, self._role.gradients = self._role.gradients, self
        try:
            output.backward(gradient)
        finally:
            self._role.gradients = outer
            for master, before in zip(self._masters, theirs, strict=True):
                if master.grad is not None:
                    self._sums[master] = master.grad
                master.grad = before

    def add_product(self, master: Tensor, dy: Tensor, x: Tensor) -> bool:
        """Add dy^T @ x (`weight_grad`) to the sum of `master`. False, and nothing done, for one that is not its own.

        Called in the backward of a layer, while this accumulator's own `backward` runs.
        """
        if master not in self._known:
            return False
        product = weight_grad(dy, x, into=master.grad)
        if product is not None:
            master.grad = product
        return True

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
        for master, total in zip(self._masters, self.take(), strict=True):
            if total is not None and self.loss_scale != 1.0:
                total.div_(self.loss_scale)
            master.grad = total

    def clear(self) -> None:
        """Drop what is there."""
        self._sums = {}
