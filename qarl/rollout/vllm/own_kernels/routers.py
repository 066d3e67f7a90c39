"""Which experts vLLM's own routers choose, for `qarl.rollout.vllm.recording`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from qarl.errors import UserError


class Tap:
    """The last choice of one of vLLM's routers, as its `capture_fn`."""

    def __init__(self, rows: int, per_token: int) -> None:
        self.taken = torch.zeros(rows, per_token, dtype=torch.int16)

    def __call__(self, experts: Tensor) -> None:
        self.taken[: len(experts)].copy_(experts)


class Taps:
    """The taps of a model's routers, in layer order."""

    def __init__(self, model: nn.Module) -> None:
        runners = [module for module in model.modules() if hasattr(module, "routed_experts")]
        found = [getattr(runner.router, "capture_fn", None) for runner in runners]
        if not found or not all(isinstance(tap, Tap) for tap in found):
            raise ValueError("vLLM made its routers without qarl's taps")
        if any(runner.routed_experts.quant_method.is_monolithic for runner in runners):
            raise UserError("model.routing: vLLM's kernel for these experts routes inside; set rollout.numerics=exact")
        self._taps: list[Tap] = found

    def rows(self, count: int) -> Tensor:
        return torch.stack([tap.taken[:count] for tap in self._taps], 1).sort(-1).values


@contextmanager
def tapped(wanted: bool) -> Iterator[None]:
    """Inside, routers that vLLM creates get taps, before CUDA graphs are captured. wanted: Whether they do at all."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    make = BaseRouter.__init__

    @wraps(make)
    def making(self: BaseRouter, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.set_capture_fn(Tap(get_current_vllm_config().scheduler_config.max_num_batched_tokens, self.top_k))

    if wanted:
        BaseRouter.__init__ = making
    try:
        yield
    finally:
        BaseRouter.__init__ = make
