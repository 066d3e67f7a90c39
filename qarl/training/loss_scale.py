"""The loss scale, which keeps a float16 learner's gradients from underflowing; follows `torch.amp.GradScaler`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from qarl.config import Config

# GradScaler's defaults.
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
LARGEST = 2.0**100  # the scaled loss stays far below float32's 3.4e38


@dataclass
class LossScale:
    """The current loss scale. All ranks see the same gradient norms, so they all have the same one.

    Attributes:
        value: The loss is multiplied by it, and the gradients are divided by it.
        dynamic: Whether `update` changes it.
        good: Finite gradients since the last change.
        settled: Whether any gradient was finite at a dynamic scale; until then the scale is still being searched.
    """

    value: float
    dynamic: bool = False
    good: int = 0
    settled: bool = False

    @classmethod
    def of(cls, config: Config) -> LossScale:
        return cls(config.loss_scale, dynamic=config.dynamic_loss_scale)

    @property
    def searching(self) -> bool:
        """Whether an overflow only means that the first scale was too large."""
        return self.dynamic and not self.settled and self.value >= 1.0

    def update(self, finite: bool) -> None:
        """Halve the scale after a gradient that is not finite; double it after `GROWTH_INTERVAL` finite ones."""
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
        """For a checkpoint, see `load`."""
        return asdict(self)

    def load(self, state: dict[str, Any] | None) -> None:
        """Continue from a state. None, or a state of a fixed scale, or a fixed scale here: keep the configured one."""
        if self.dynamic and state is not None and state["dynamic"]:
            self.value, self.good, self.settled = state["value"], state["good"], state["settled"]
