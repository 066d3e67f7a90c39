"""What CUDA graphs know by address outlives a reload: lock words, and what hangs on layers as plain attributes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from qarl.rollout.vllm.known_to_graphs import Attributes, workspaces
from qarl.rollout.vllm.loading import Loader


def layer(workspace: torch.Tensor | None, place: str) -> nn.Module:
    module = nn.Linear(2, 2)
    if place == "layer":
        module.workspace = workspace
    else:
        setattr(module, place, SimpleNamespace(kernel=SimpleNamespace(workspace=workspace)))
    return module


def test_workspaces_are_found_on_layers_and_on_the_kernels_of_schemes_and_methods():
    own, scheme, method = (torch.zeros(4, dtype=torch.int32) for _ in range(3))
    modules = [layer(own, "layer"), layer(scheme, "scheme"), layer(method, "quant_method"), nn.Linear(2, 2)]
    modules.append(layer(scheme, "scheme"))  # shared with another layer: once is enough
    modules.append(layer(None, "scheme"))  # a kernel that has none, as before its weights are processed
    found = workspaces(modules)
    assert [w.data_ptr() for w in found] == [w.data_ptr() for w in (own, scheme, method)]


def test_a_held_workspace_outlives_the_reload_that_replaces_it():
    module = layer(torch.zeros(4, dtype=torch.int32), "scheme")
    old = weakref.ref(module.scheme.kernel.workspace)
    held = workspaces([module])
    module.scheme.kernel.workspace = torch.zeros(4, dtype=torch.int32)  # as process_weights_after_loading does
    gc.collect()
    assert old() is held[0]
    del held
    gc.collect()
    assert old() is None


def test_counters_are_0_after_a_sleep_that_kept_no_such_memory():
    old = torch.zeros(4, dtype=torch.int32)
    model = nn.ModuleList([layer(old, "scheme")])
    worker = SimpleNamespace(device=torch.device("cpu"), model_runner=SimpleNamespace(get_model=lambda: model))
    loader = Loader(worker, SimpleNamespace(plain=frozenset(), units={}), {}, Path("no checkpoint"), staging=False)
    model[0].scheme.kernel.workspace = torch.zeros(4, dtype=torch.int32)  # graphs go on with the old one
    old.fill_(7)
    loader.wake()
    assert not old.any()


def test_what_replaces_a_plain_attribute_goes_into_the_first_one():
    module, scales = nn.Linear(2, 2), torch.ones(3)
    module.scales, module.count = scales, 3
    attributes = Attributes([module, nn.Linear(2, 2)])
    attributes.follow()
    assert torch.equal(scales, torch.ones(3))
    module.scales = torch.arange(3.0)
    attributes.follow()
    assert torch.equal(scales, torch.arange(3.0)) and module.scales is not scales
    for other in (torch.zeros(4), torch.zeros(3, dtype=torch.int32), None):  # of another kind
        module.scales = other
        attributes.follow()
        assert torch.equal(scales, torch.arange(3.0))


def test_parameters_and_buffers_are_no_plain_attributes():
    module = nn.BatchNorm1d(2)
    weight = module.weight
    attributes = Attributes([module])
    module.weight = nn.Parameter(torch.zeros(2))
    attributes.follow()
    assert torch.equal(weight, torch.ones(2))
