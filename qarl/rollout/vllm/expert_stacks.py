"""Published stacks of experts into the layers of vLLM's own kernels that repack them, each parameter at once.

vLLM's loaders take the tensors of one expert at a time, and vLLM 0.24's layerwise reload adds up what it holds back at
every call: seen on an H200, 64 s for the 768 experts of 6 layers of Qwen3-30B-A3B in W4A16, and more than linear in
layers. Here a layer whose reload has begun is given its stacks as one delayed load of each parameter; what vLLM makes
of the parameters when the reload ends is vLLM's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from qarl.weight_sync.shards import METADATA


def give_stacks(layer: nn.Module, stacks: Mapping[str, Tensor]) -> bool:
    """Load all that was published of a layer's experts when its reload, which has begun, ends.

    stacks: in checkpoint layout, by the name of the parameter (`w13_weight_packed`). Returns False, and does nothing,
    where a stack has no parameter that holds it as it is or transposed: vLLM's loaders may know how.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters: dict[str, Any] = {name: held for name, held in layer._parameters.items() if held is not None}
    laid: dict[str, Tensor] = {}
    for name, stack in stacks.items():
        found = laid_out(name, stack, parameters[name]) if name in parameters else None
        if found is None:
            return False
        laid[name] = found
    info = get_layerwise_info(layer)
    for name, parameter in parameters.items():
        parameter.weight_loader = _put
        info.loaded_weights.append((name, inspect.signature(_put).bind(parameter, laid.get(name))))
    info.load_numel = 1  # more than nothing, and less than all: what a reload repacks when it ends
    return True


def laid_out(name: str, stack: Tensor, parameter: nn.Parameter) -> Tensor | None:
    """A published stack, of all experts under one another, as vLLM's parameter of all experts has it, which vLLM may
    call transposed; None where the shapes are others."""
    shape = parameter.shape
    if not shape or len(stack) % shape[0]:
        return None
    each = stack.unflatten(0, (shape[0], len(stack) // shape[0]))
    if name.endswith(tuple(suffix.removeprefix(".") for suffix in METADATA)):
        each = each[:, -shape[-1] :]  # gate's and up's are the same
    elif getattr(parameter, "is_transposed", False) and each.dim() == 3:
        each = each.transpose(1, 2)
    if each.dim() == 2 and each.shape[1] == 1 and len(shape) == 1:
        each = each[:, 0]  # a number of each expert
    return each if each.shape == shape else None


def _put(param: nn.Parameter, loaded: Tensor | None) -> None:
    """A weight loader of a whole parameter. None: of what no published tensor stands for, and no kernel reads."""
    if loaded is None:
        param.data.zero_()
    else:
        param.data.copy_(loaded)
