"""What an optimizer step is made of, whoever holds the masters: one process, or several their rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from qarl.storage.pieces import Piece


class Updates(ABC):
    """Gradients, optimizer and masters of the policy.

    On several ranks `backward`, `norm`, `step`, `pieces` and `load` are collectives. kind: `optim.name`.
    """

    kind: str

    @property
    @abstractmethod
    def begun(self) -> int:
        """Optimizer steps that were begun, finished or not: after an exception it tells whether masters may be other
        than they were."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the gradient gathered so far, delivered or not."""

    @abstractmethod
    def backward(self, loss: Tensor | None) -> None:
        """Add the gradient of a micro-batch's loss; None on a rank that has none in this round."""

    @abstractmethod
    def norm(self) -> float:
        """The L2 norm of the whole gradient, unscaled, the same on all ranks; after it the gradient is in place."""

    @abstractmethod
    def set_lr(self, factor: float) -> None:
        """Scales the configured learning rates, see `lr_at`."""

    @abstractmethod
    def step(self, norm: float) -> None:
        """Clip by `norm`, as `norm()` gave it, step, quantize once, and let the policy read the next version."""

    @abstractmethod
    def pieces(self) -> tuple[list[Piece], dict[str, Any]]:
        """(what this rank holds of masters and optimizer state, JSON-able meta of the optimizer)."""

    def finish(self) -> None:
        """All steps of this start are done. A collective."""
        return

    @abstractmethod
    def load(self, read: Callable[[str, str, int, int], Tensor], meta: dict[str, Any], version: int) -> None:
        """Put masters and optimizer state back, and quantize the masters as policy `version`.

        read(group, name, start, stop): elements of the flattened tensor, float32, on the CPU. Raises ValueError, before
        anything is changed, for a state of another optimizer or one that does not fit.
        """
