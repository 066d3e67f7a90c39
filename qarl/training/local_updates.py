"""Gradients, optimizer and masters of a run of one process, which holds all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qarl.config import Config
from qarl.policy.gradients import GradientAccumulator
from qarl.policy.policy import Policy
from qarl.storage.pieces import Piece
from qarl.training.offload import HostValues
from qarl.training.optim import build_optimizer, clip_grads, grad_norm
from qarl.training.updates import Updates


class LocalUpdates(Updates):
    """The policy's own parameters are the masters, and their `.grad` what the optimizer reads."""

    def __init__(self, policy: Policy, config: Config) -> None:
        self.policy, self.config = policy, config
        self.optimizer = build_optimizer(policy.named_parameters(), config.optim)
        self.kind = self.optimizer.kind
        self._masters = [parameter for _, parameter in policy.named_parameters()]
        self.gradients = GradientAccumulator(self._masters, config.loss_scale)

    @property
    def begun(self) -> int:
        return self.optimizer.begun

    def clear(self) -> None:
        self.gradients.clear()
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor | None) -> None:
        assert loss is not None, "one process has a part in every round"
        scale = self.config.loss_scale
        self.gradients.backward(loss if scale == 1.0 else loss * scale)

    def norm(self) -> float:
        self.gradients.deliver()
        return grad_norm(self._masters)

    def set_lr(self, factor: float) -> None:
        self.optimizer.set_lr(factor)

    def step(self, norm: float) -> None:
        clip_grads(self._masters, norm, self.config.optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()  # the next version is made in their memory
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
        shapes = self.optimizer.state_shapes(meta)
        state = {name: read("optimizer", name, 0, shape.numel()).view(shape) for name, shape in shapes.items()}
        self.optimizer.load_state_tensors(state, meta)
        for name, value in self._values().items():
            value.copy_(read("masters", name, 0, value.numel()).view_as(value))
        self.publish(version)

    def _values(self) -> dict[str, Tensor]:
        """The masters' by name, in the policy's order, wherever they are kept."""
        held = self.optimizer.masters()
        return {name: held.get(name, parameter.detach()) for name, parameter in self.policy.named_parameters()}

    def publish(self, version: int) -> None:
        """Quantize the masters, and let the policy read the result."""
        on_host = self.config.optim.offload == "all"
        self.policy.refresh(version, HostValues(self._values(), self.policy.device) if on_host else None)
