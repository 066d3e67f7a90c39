"""Float32 sums of gradients over the backwards of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class GradientAccumulator:
    """Sums the masters' gradients over the micro-batches of an optimizer step.

    The sums are `.grad` of the masters only during `backward`: Triton layers add to it themselves, autograd adds the
    rest. Outside, `.grad` keeps what it held, so the backwards of a diagnostic do not touch the learner's sums.
    `deliver` puts the sums there for an optimizer.

    Args:
        masters: Float32 leaves.
    """

    def __init__(self, masters: Iterable[nn.Parameter]) -> None:
        self._masters = list(masters)
        self._sums: dict[nn.Parameter, Tensor] = {}  # a tensor hashes by identity

    def backward(self, output: Tensor, gradient: Tensor | None = None) -> None:
        """Add the gradients of `output`: a scalar loss, or a tensor with its output gradient of the same shape."""
        outside = [master.grad for master in self._masters]
        for master in self._masters:
            master.grad = self._sums.get(master)
        try:
            output.backward(gradient)
        finally:
            for master, before in zip(self._masters, outside, strict=True):
                if master.grad is not None:
                    self._sums[master] = master.grad
                master.grad = before

    def take(self) -> list[Tensor | None]:
        """Return the sums in the order of the masters, None for a master without a gradient, and clear them.

        They are not divided by the loss scale.
        """
        sums, self._sums = self._sums, {}
        return [sums.get(master) for master in self._masters]

    @torch.no_grad()
    def deliver(self, loss_scale: float = 1.0) -> None:
        """Move the sums, divided by `loss_scale`, by which every loss was multiplied, to `.grad` of the masters."""
        totals = self.take()
        if loss_scale != 1.0 and (scaled := [total for total in totals if total is not None]):
            torch._foreach_div_(scaled, loss_scale)
        for master, total in zip(self._masters, totals, strict=True):
            master.grad = total

    def clear(self) -> None:
        """Drop the sums."""
        self._sums = {}
