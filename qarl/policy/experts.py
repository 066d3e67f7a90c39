"""The experts of a layer as modules with 2-dimensional masters, named as in checkpoints.

transformers holds the experts of a layer in two 3-dimensional tensors. Here each expert has Linear modules like any
other layer, so that schemes and optimizers treat them alike. Their weights are views: no value is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from qarl_formats.rows import adjacent, concatenate_rows
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from qarl.errors import UserError
from qarl.utils.expert_names import EXPERT_NAMES, ExpertNames

BLOCK = "mlp"  # attribute of a transformers layer that holds its experts, whatever checkpoints call it


class Router(nn.Module):
    """Float32 master of a router (E, H) or of a shared expert's gate (1, H). It has no forward of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Mixture(nn.Module):
    """Router and experts of a layer; some families add a shared expert and its gate under their own names."""

    def __init__(self, router: Router, experts: nn.ModuleList, activation: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts, self.act_fn = router, experts, activation


def normalizes(config: PreTrainedConfig) -> bool:
    """Whether the weights of a token's experts are divided by their sum."""
    return config.model_type == "mixtral" or bool(config.norm_topk_prob)


def take_apart(model: PreTrainedModel) -> None:
    """Replace the experts of each layer by a `Mixture`, in place. Does nothing for a dense or already converted model.

    Raises UserError for an unknown layout of experts.
    """
    names = EXPERT_NAMES.get(model.config.model_type)
    if names is None:
        return
    decoder: Any = model.base_model
    for index, layer in enumerate(decoder.layers):
        block = getattr(layer, BLOCK, None)
        if hasattr(block, "experts") and not isinstance(block, Mixture):
            delattr(layer, BLOCK)
            setattr(layer, names.block, _apart(block, names, f"model.layers.{index}.{names.block}"))


def _apart(block: Any, names: ExpertNames, place: str) -> Mixture:
    fused = block.experts
    gate_up, down = getattr(fused, "gate_up_proj", None), getattr(fused, "down_proj", None)
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or gate_up.shape[1] != 2 * down.shape[2]:
        raise UserError(
            f"model.path: {place}: its experts are not stored as gate_up_proj and down_proj; use another model"
        )
    experts = nn.ModuleList()
    for both, last in zip(gate_up.detach(), down.detach(), strict=True):
        gate, up = both.chunk(2)
        experts.append(nn.ModuleDict({names.gate: _linear(gate), names.up: _linear(up), names.down: _linear(last)}))
    mixture = Mixture(_router(block.gate), experts, fused.act_fn)
    if names.shared is not None:
        mixture.add_module(names.shared, getattr(block, names.shared))
        mixture.add_module(f"{names.shared}_gate", _router(getattr(block, f"{names.shared}_gate")))
    return mixture


def _router(gate: Any) -> Router:
    return Router(nn.Parameter(gate.weight.detach()))


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Initialize nothing: thousands of experts would spend most of the time on values that are replaced."""


def _linear(weight: Tensor) -> nn.Linear:
    n, k = weight.shape
    linear = _Linear(k, n, bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    return linear


@torch.no_grad()
def move_experts(model: nn.Module, device: torch.device) -> None:
    """Move experts to a device and keep those of a layer adjacent in memory, so that they stay one tensor."""
    for block in model.modules():
        if isinstance(block, Mixture):
            experts = [list(expert.parameters()) for expert in block.experts]  # gate, up, down; none has a bias
            stacks = [part for expert in experts for part in expert[:2]], [expert[2] for expert in experts]
            for masters in stacks:
                if adjacent(masters) and masters[0].device != device:
                    moved = concatenate_rows(masters).to(device)
                    for master, rows in zip(masters, moved.split([len(one) for one in masters]), strict=True):
                        master.data = rows
