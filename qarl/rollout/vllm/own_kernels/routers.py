"""Which experts vLLM's own routers choose, for `qarl.rollout.vllm.recording`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from qarl.errors import UserError
from qarl.rollout.vllm.recording import Buffer, Experts


def routers_of(model: nn.Module) -> Experts:
    """What a model's routers chose last, in layer order."""
    runners = [module for module in model.modules() if hasattr(module, "routed_experts")]
    buffers = [getattr(runner.router, "capture_fn", None) for runner in runners]
    if not buffers or not all(isinstance(buffer, Buffer) for buffer in buffers):
        raise ValueError("vLLM made its routers without qarl's buffers")
    if any(runner.routed_experts.quant_method.is_monolithic for runner in runners):
        raise UserError("model.routing: vLLM's kernel for these experts routes inside; set rollout.numerics=exact")
    return lambda rows: torch.stack([buffer.rows(rows) for buffer in buffers], 1).sort(-1).values


@contextmanager
def routers_recorded() -> Iterator[None]:
    """Inside, routers that vLLM creates get buffers for their choices, before CUDA graphs are captured."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    make = BaseRouter.__init__

    @wraps(make)
    def making(self: BaseRouter, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.set_capture_fn(Buffer(get_current_vllm_config().scheduler_config.max_num_batched_tokens, self.top_k))

    with patch.object(BaseRouter, "__init__", making):
        yield
