"""Tensors that CUDA graphs read by address survive a reload: lock words, and plain attributes of layers."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loaders import loader_of
from torch import nn

from qarl.rollout.vllm.own_kernels.graph_tensors import SMALL, KernelTensors
from qarl.rollout.vllm.own_kernels.loaded_model import Unit


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


def test_views_are_restored_with_their_whole_storage():
    module, whole = nn.Linear(2, 2), torch.arange(6)
    module.scheme = Held(column=whole.view(2, 3)[:, :1], one=whole[5:].expand(4))
    assert restored([module], whole)


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


def test_a_shared_tensor_is_held_once_and_a_missing_one_not_at_all():
    shared, modules = words(5), [nn.Linear(2, 2) for _ in range(3)]
    for module, workspace in zip(modules, (shared, shared, None), strict=True):
        module.scheme = Held(kernel=Held(workspace=workspace))
    assert [tensor.data_ptr() for tensor in KernelTensors(modules)._held] == [shared.data_ptr()]


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


def test_a_loader_restores_the_first_tensors_of_its_layers():
    old = words(4)
    model = nn.ModuleDict({"layer": nn.Linear(2, 2)})
    model["layer"].scheme = Held(kernel=Held(workspace=old))
    held = SimpleNamespace(plain=frozenset(), units={}, unit_of=lambda name: Unit("layer", ("layer",)))
    loader = loader_of(model, held, {"layer.weight": None})
    model["layer"].scheme.kernel.workspace = words(1)  # graphs go on with the old one
    loader.kernel_tensors.save()
    old.fill_(7)
    loader.kernel_tensors.restore()
    assert torch.equal(old, words(4)) and torch.equal(model["layer"].scheme.kernel.workspace, words(1))
    old.fill_(8)
    loader.kernel_tensors.restore()  # after no sleep
    assert torch.equal(old, words(8))


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


def test_parameters_and_buffers_are_no_plain_attributes():
    module = nn.BatchNorm1d(2)
    weight = module.weight
    attributes = KernelTensors([module])
    module.weight = nn.Parameter(torch.zeros(2))
    attributes.copy_replaced()
    assert torch.equal(weight, torch.ones(2))
