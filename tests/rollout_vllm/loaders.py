"""Models with experts as vLLM's, and the loader of published tensors into a model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from qarl.rollout.vllm.own_kernels.loading import Loader
from qarl.rollout.vllm.own_kernels.tensor_parallel import Shard

EXPERTS = "layers.0.mlp.experts"


def model_of(experts: nn.Module) -> nn.Module:
    """A model whose only layer is `layers.0.mlp.experts.routed_experts`."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].mlp = nn.Module()
    model.layers[0].mlp.experts = nn.Module()
    model.layers[0].mlp.experts.routed_experts = experts
    return model


def loader_of(model: nn.Module, held: Any, expected: dict[str, Any], device: str = "cpu", **worker: Any) -> Loader:
    """A loader without a checkpoint, as for the only GPU of a model. worker: Further attributes of vLLM's worker."""
    runner = SimpleNamespace(get_model=lambda: model)
    vllm = SimpleNamespace(device=torch.device(device), model_runner=runner, **worker)
    return Loader(vllm, held, expected, Path("no checkpoint"), staging=False, shard=Shard())
