"""Masters of a policy whose values somebody else holds: parameters of full shape over one element of memory.

A forward reads the view and never a master, and a gradient needs its shape alone; NaN shows whoever reads one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def handle(shape: Sequence[int], device: torch.device) -> Tensor:
    """NaN of this shape, float32, all of it one element."""
    return torch.full((1,), math.nan, device=device).expand(tuple(shape))


def empty(masters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Their values go, and they take gradients."""
    for master in masters:
        master.data = handle(master.shape, device)
        master.requires_grad_(True)


def stand_in(model: nn.Module, device: torch.device) -> None:
    """Put handles in place of a skeleton's parameters on the meta device, which can get no other memory; tied: once."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tensor's hash is its identity
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(handle(parameter.shape, device))
                setattr(module, leaf, made[parameter])
