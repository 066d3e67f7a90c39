"""Models with the module names of vLLM's mixtures, and a `Loader` for them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from qarl.rollout.vllm.own_kernels.loading import Loader
from qarl.rollout.vllm.own_kernels.tensor_parallel import Shard

EXPERTS = "layers.0.mlp.experts"


def model_of(experts: nn.Module) -> nn.Module:
    """Return a model whose only layer, `layers.0.mlp.experts.routed_experts`, is `experts`."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].mlp = nn.Module()
    model.layers[0].mlp.experts = nn.Module()
    model.layers[0].mlp.experts.routed_experts = experts
    return model


def loader_of(model: nn.Module, held: Any, expected: dict[str, Any], device: str = "cpu", **worker: Any) -> Loader:
    """Return a loader without checkpoint and staging, for an unsharded model. worker: More attributes of the worker."""
    runner = SimpleNamespace(get_model=lambda: model)
    vllm = SimpleNamespace(device=torch.device(device), model_runner=runner, **worker)
    return Loader(vllm, held, expected, Path("no checkpoint"), staging=False, shard=Shard())
