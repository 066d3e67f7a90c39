"""Optimizer engines: the interface of gradients, optimizer and master weights, and the single-process engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from qarl.config import Config
from qarl.policy.gradients import GradientAccumulator
from qarl.policy.policy import Policy
from qarl.storage.pieces import Piece
from qarl.training.loss_scale import LossScale
from qarl.training.optim import build_optimizer, clip_grads, grad_norm


class LazyValues(Mapping[str, Tensor]):
    """Master weights by name, fetched at each access. Callers must not modify them: they may be the originals.

    Args:
        names: Names of the master weights, in the same order on all ranks.
        fetch: Returns the master weight of a name, on the policy's device.
    """

    def __init__(self, names: Collection[str], fetch: Callable[[str], Tensor]) -> None:
        self._names, self._fetch = names, fetch

    def __getitem__(self, name: str) -> Tensor:
        return self._fetch(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def on_device(values: Mapping[str, Tensor], device: torch.device) -> LazyValues:
    """Return a mapping that copies a tensor to `device` at each access, unless it is there already."""
    return LazyValues(values, lambda name: values[name].to(device, non_blocking=True))


class Updates(ABC):
    """Optimizer engine: gradients, optimizer and master weights of the policy.

    With several ranks `backward`, `norm`, `step`, `pieces` and `load` are collectives.

    Attributes:
        kind: `optim.name`.
        scale: Loss scale.
        begun: Number of optimizer steps begun, finished or not. If it grew before an error, weights may have changed.
    """

    kind: str
    scale: LossScale
    begun = 0

    @abstractmethod
    def clear(self) -> None:
        """Drop the gradient accumulated so far."""

    @abstractmethod
    def backward(self, loss: Tensor | None) -> None:
        """Add the gradient of a micro-batch's loss; None on a rank without a micro-batch in this round."""

    @abstractmethod
    def norm(self) -> float:
        """Complete the gradient and return its unscaled L2 norm, the same on all ranks."""

    @abstractmethod
    def set_lr(self, factor: float) -> None:
        """Scale the configured learning rates by `factor`; see `lr_at`."""

    @abstractmethod
    def step(self, norm: float) -> None:
        """Clip by `norm` (from `norm()`), step, quantize once, and switch the policy to the next version."""

    @abstractmethod
    def pieces(self) -> tuple[list[Piece], dict[str, Any]]:
        """Return this rank's pieces of master weights and optimizer state, and JSON-able metadata for `load`."""

    def finish(self) -> None:
        """Called after the last step of the run. A collective."""
        return

    @abstractmethod
    def load(self, read: Callable[[str, str, int, int], Tensor], meta: dict[str, Any], version: int) -> None:
        """Restore master weights and optimizer state, and quantize the weights as policy `version`.

        Args:
            read: `read(group, name, start, stop)` returns elements of the flattened tensor, float32, on the CPU.
            meta: Metadata from `pieces`.
            version: Version of the policy.

        Raises:
            ValueError: The state belongs to another optimizer or does not fit. Nothing has been changed.
        """


class LocalUpdates(Updates):
    """Single-process engine: the policy's parameters are the master weights, with gradients in `.grad`."""

    def __init__(self, policy: Policy, config: Config) -> None:
        self.policy, self.config = policy, config
        self.optimizer = build_optimizer(policy.named_parameters(), config.optim)
        self.kind = self.optimizer.kind
        self._masters = [parameter for _, parameter in policy.named_parameters()]
        self.gradients, self.scale = GradientAccumulator(self._masters), LossScale.of(config)

    def clear(self) -> None:
        self.gradients.clear()
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor | None) -> None:
        assert loss is not None, "a single process has a micro-batch in every round"
        self.gradients.backward(self.scale.scaled(loss))

    def norm(self) -> float:
        self.gradients.deliver(self.scale.value)
        return grad_norm(self._masters)

    def set_lr(self, factor: float) -> None:
        self.optimizer.set_lr(factor)

    def step(self, norm: float) -> None:
        self.begun += 1
        clip_grads(self._masters, norm, self.config.optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()  # before publishing, so that the next version reuses the gradients' memory
        self.publish(self.policy.version + 1)

    def pieces(self) -> tuple[list[Piece], dict[str, Any]]:
        tensors, meta = self.optimizer.state_tensors()
        return [
            Piece(group, name, tuple(value.shape), 0, value.reshape(-1))
            for group, values in (("masters", self._values()), ("optimizer", tensors))
            for name, value in values.items()
        ], meta

    @torch.no_grad()
    def load(self, read: Callable[[str, str, int, int], Tensor], meta: dict[str, Any], version: int) -> None:
        self.optimizer.load_state(meta, lambda name, shape: read("optimizer", name, 0, shape.numel()).view(shape))
        for name, value in self._values().items():
            value.copy_(read("masters", name, 0, value.numel()).view_as(value))
        self.publish(version)

    def _values(self) -> dict[str, Tensor]:
        """Return master weights by name, in the policy's order, on the device or on the host."""
        masters = self.optimizer.masters()
        return {name: masters.get(name, parameter.detach()) for name, parameter in self.policy.named_parameters()}

    def publish(self, version: int) -> None:
        """Quantize the master weights and switch the policy to the result."""
        on_host = self.config.optim.offload == "all"
        self.policy.refresh(version, on_device(self._values(), self.policy.device) if on_host else None)
