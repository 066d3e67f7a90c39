"""Tensors that CUDA graphs read by address survive a reload: lock words, and plain attributes of layers."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from qarl.rollout.vllm.own_kernels.graph_tensors import SMALL, KernelTensors


class Held:
    """An object whose class appears to be vLLM's, by the name of its module."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


class Other(Held):
    pass


Held.__module__ = "vllm.model_executor.layers"


def words(value: int = 0) -> torch.Tensor:
    return torch.full((4,), value, dtype=torch.int32)


def restored(modules: list[nn.Module], tensor: torch.Tensor) -> bool:
    """Whether a tensor is restored after its memory was lost."""
    kernels, before = KernelTensors(modules), tensor.clone()
    kernels.save()
    tensor.fill_(77)
    kernels.restore()
    return torch.equal(tensor, before)


@pytest.mark.parametrize(
    "hung",
    [
        lambda t: {"workspace": t},
        lambda t: {"scheme": Held(kernel=Held(workspace=t))},
        lambda t: {"quant_method": Held(moe_kernel=Held(impl=Held(fused_experts=Held(ab_strides1=t, c_strides2=t))))},
    ],
    ids=["layer", "scheme", "experts"],
)
def test_small_tensors_of_kernels_survive_a_sleep(hung):
    module, tensor = nn.Linear(2, 2), words(5)
    for name, value in hung(tensor).items():
        setattr(module, name, value)
    assert restored([nn.Linear(2, 2), module], tensor)
    assert restored([module], words(3).expand(2, 4)) is False  # of no module


def test_weights_large_tensors_and_other_objects_are_not_restored():
    module, large = nn.Linear(2, 2), torch.zeros(SMALL + 1, dtype=torch.uint8)
    other = words()
    module.scheme = Held(scale=module.weight.data[0], large=large, below=Other(words=other), model=nn.Linear(2, 2))
    module.scheme.itself = module.scheme
    kernels = KernelTensors([module])
    kernels.save()
    for tensor in (module.weight.data, large, other, module.scheme.model.weight.data):
        tensor.fill_(9)
    kernels.restore()
    assert all(bool((t == 9).all()) for t in (module.weight, large, other, module.scheme.model.weight))


def test_replaced_tensors_stay_alive_because_graphs_read_them():
    module, memory = nn.Linear(2, 2), np.zeros(4, dtype=np.int32)
    module.scheme = Held(kernel=Held(workspace=torch.from_numpy(memory)))
    old = weakref.ref(memory)
    del memory
    kernels = KernelTensors([module])
    module.scheme.kernel.workspace = words(1)  # as process_weights_after_loading does
    gc.collect()
    assert old() is not None
    del kernels
    gc.collect()
    assert old() is None


def test_a_replaced_plain_attribute_is_copied_into_the_first_one():
    module, scales = nn.Linear(2, 2), torch.ones(3)
    module.scales, module.count = scales, 3
    attributes = KernelTensors([module, nn.Linear(2, 2)])
    attributes.copy_replaced()
    assert torch.equal(scales, torch.ones(3))
    module.scales = torch.arange(3.0)
    attributes.copy_replaced()
    assert torch.equal(scales, torch.arange(3.0)) and module.scales is not scales
    for other in (torch.zeros(4), torch.zeros(3, dtype=torch.int32), None):  # of another kind
        module.scales = other
        attributes.copy_replaced()
        assert torch.equal(scales, torch.arange(3.0))
