"""Experts that vLLM stores as published are found, written in place as two stacks, and verified."""

from types import SimpleNamespace

import pytest
import torch
from loaders import EXPERTS, loader_of, model_of
from torch import Tensor, nn

from qarl.rollout.vllm.own_kernels.loaded_model import LoadedModel
from qarl.rollout.vllm.own_kernels.loading import Loader
from qarl.weight_sync.expert_tensors import join_experts
from qarl.weight_sync.fingerprints import PublishError, fingerprints

COUNT, INNER, HIDDEN = 5, 4, 6
LAYER = f"{EXPERTS}.routed_experts"


def snapshot(seed: int) -> dict[str, Tensor]:
    """Return the int8 codes and bf16 scales of all experts, as published."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for expert in range(COUNT):
        for leaf, (rows, columns) in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            name = f"{EXPERTS}.{expert}.{leaf}_proj"
            codes = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
            tensors[f"{name}.weight"] = codes
            tensors[f"{name}.weight_scale"] = torch.rand(rows, 1, generator=generator).bfloat16()
    return join_experts(tensors)


def as_vllm(tensors: dict[str, Tensor]) -> nn.Module:
    """Return a model with one parameter of all experts per suffix, like vLLM's grouped CUDA kernels."""
    layer = nn.Module()
    layer.moe_config = SimpleNamespace(num_experts=COUNT)
    for name, tensor in tensors.items():
        stem, suffix = name.removeprefix(f"{EXPERTS}.").split(".")
        held = tensor.float() if suffix == "weight_scale" else tensor.clone()  # vLLM widens scales
        parameter = nn.Parameter(held.view(COUNT, -1, held.shape[1]), requires_grad=False)
        layer.register_parameter(f"{stem}_{suffix}", parameter)
    return model_of(layer)


def loaded(model: nn.Module, version: dict[str, Tensor]) -> tuple[LoadedModel, Loader]:
    """Return the loaded model and its `Loader`, as on a GPU. The model cannot load by itself."""
    expected = fingerprints(version.items())
    held = LoadedModel(model, expected)
    return held, loader_of(model, held, expected, "cuda")


def test_stacks_are_written_in_place_and_verified() -> None:
    first, second = snapshot(0), snapshot(1)
    assert len(first) == 4  # codes and scales of two stacks, however many experts
    model = as_vllm(first)
    layer = model.get_submodule(LAYER)
    addresses = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    held, loader = loaded(model, first)
    assert held.plain == {LAYER} and held.proved_frac == 1.0
    expected = fingerprints(second.items())
    loader.load(second)
    held.check(1, expected)
    for name, wanted in as_vllm(second).get_submodule(LAYER).named_parameters():
        assert torch.equal(layer.get_parameter(name), wanted), name
    assert addresses == {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}


def test_one_wrong_value_of_one_expert_is_refused() -> None:
    first, second = snapshot(0), snapshot(1)
    model = as_vllm(first)
    held, loader = loaded(model, first)
    expected = fingerprints(second.items())
    loader.load(second)
    model.get_submodule(LAYER).w2_weight.data[3, 1, 2] ^= 1
    with pytest.raises(PublishError, match=rf"'{EXPERTS}\.w2\.weight' differs in vLLM"):
        held.check(1, expected)


def test_experts_in_an_order_of_the_kernels_own_are_not_written_in_place() -> None:
    first = snapshot(0)
    model = as_vllm(first)
    layer = model.get_submodule(LAYER)
    layer.w13_weight.data = layer.w13_weight.data.view(COUNT, 2, INNER, HIDDEN).flip(1).flatten(1, 2)  # up, then gate
    assert LoadedModel(model, fingerprints(first.items())).plain == frozenset()
