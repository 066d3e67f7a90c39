"""Loss scaling for float16 learners, following `torch.amp.GradScaler`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from qarl.config import Config

# GradScaler's defaults.
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
LARGEST = 2.0**100  # the scaled loss stays far below float32's 3.4e38


@dataclass
class LossScale:
    """Loss scale. All ranks see the same gradient norms and therefore have the same scale.

    Attributes:
        value: Factor by which the loss is multiplied, and the gradients are divided afterwards.
        dynamic: Whether `update` changes the scale.
        good: Consecutive finite gradients since the last change.
        settled: Whether a gradient has been finite at a dynamic scale. Until then, `update` searches for the initial
            scale.
    """

    value: float
    dynamic: bool = False
    good: int = 0
    settled: bool = False

    @classmethod
    def of(cls, config: Config) -> LossScale:
        """Return the initial scale of a run."""
        return cls(config.loss_scale, dynamic=config.dynamic_loss_scale)

    @property
    def searching(self) -> bool:
        """Whether a non-finite gradient only means that the initial scale is too large."""
        return self.dynamic and not self.settled and self.value >= 1.0

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        return loss if self.value == 1.0 else loss * self.value

    def update(self, finite: bool) -> None:
        """Halve the scale after a non-finite gradient; double it after `GROWTH_INTERVAL` finite ones."""
        if not self.dynamic:
            return
        if not finite:
            self.value, self.good = self.value * BACKOFF, 0
            return
        self.settled = True
        self.good += 1
        if self.good == GROWTH_INTERVAL:
            self.value, self.good = min(self.value * GROWTH, LARGEST), 0

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; see `load`."""
        return asdict(self)

    def load(self, state: dict[str, Any] | None) -> None:
        """Restore a state. Keep the configured scale if the state is None, or if either scale is fixed."""
        if self.dynamic and state is not None and state["dynamic"]:
            self.value, self.good, self.settled = state["value"], state["good"], state["settled"]
