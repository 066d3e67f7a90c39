"""Stacks of experts given to layers of vLLM's own kernels, against what vLLM's own loaders put there.

vLLM takes ten seconds to import, so only the process that runs a test of this file does it.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loaders import EXPERTS, loader_of, model_of
from needs_vllm import needs_vllm
from qarl_formats.registry import make_scheme
from qarl_formats.weight import quantize_weight
from torch import Tensor, nn

from qarl.rollout.vllm.own_kernels.loaded_model import UNSENT, LoadedModel
from qarl.utils.expert_names import expert_stacks
from qarl.weight_sync.expert_tensors import join_experts, part_experts
from qarl.weight_sync.fingerprints import PublishError, fingerprints

pytestmark = needs_vllm
# Twice INNER is HIDDEN, so that gate and up together are square.
COUNT, HIDDEN, INNER = 3, 128, 64
LEAVES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
CASES = [
    ("w4a16", 32, "group", True),  # as vLLM 0.24 has packed int4
    ("w8a8", None, "channel", False),
    ("fp8", None, "channel", False),
    ("nvfp4a16", None, "group", False),
]


def published(name: str, group: int | None, seed: int) -> dict[str, Tensor]:
    """Return a layer's experts as published: each stored tensor of all experts, concatenated along the rows."""
    scheme, generator = make_scheme(name, group, True), torch.Generator().manual_seed(seed)
    shapes = {leaf: (HIDDEN, INNER) if leaf == "down_proj" else (INNER, HIDDEN) for leaf in LEAVES}
    named = [
        (f"{EXPERTS}.{e}.{leaf}", torch.randn(shapes[leaf], generator=generator))
        for e in range(COUNT)
        for leaf in LEAVES
    ]
    shared = scheme.shared([master for _, master in named])
    forms = {name: quantize_weight(master, scheme, name, shared=shared) for name, master in named}
    return join_experts({f"{name}.{suffix}": t for name, form in forms.items() for suffix, t in form.tensors.items()})


class CompressedTensorsWNA16MoEMethod:
    """vLLM's loaders transpose only for a class of this name. Repacks by reversing the rows and renaming."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        for name, parameter in list(layer.named_parameters()):
            delattr(layer, name)
            if not name.endswith("_shape"):
                layer.register_parameter(f"{name}_for_kernel", nn.Parameter(parameter.data.flip(0), False))


def started(tensors: dict[str, Tensor], strategy: str, transposed: bool) -> nn.Module:
    """Return a layer as vLLM starts with: parameters for these tensors, and two that no tensor is loaded into."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    QuantizeMethodBase.register(CompressedTensorsWNA16MoEMethod)
    layer = RoutedExperts.__new__(RoutedExperts)
    nn.Module.__init__(layer)
    parallel = SimpleNamespace(tp_size=1, tp_rank=0)
    layer.moe_config = SimpleNamespace(
        num_experts=COUNT,
        num_logical_experts=COUNT,
        is_act_and_mul=True,
        tp_rank=0,
        tp_size=1,
        moe_parallel_config=parallel,
        tp_shard_with_padding=False,
    )
    layer.expert_map_manager = SimpleNamespace(map_global_to_local=lambda expert: expert, num_fused_shared_experts=0)
    layer.quant_config, layer._fused_shared_expert_quantizer = None, None
    layer.quant_method = CompressedTensorsWNA16MoEMethod()
    for name, tensor in tensors.items():
        stem, suffix = name.removeprefix(f"{EXPERTS}.").split(".")
        each, kind, dtype = tensor.unflatten(0, (COUNT, -1)), strategy, tensor.dtype
        shape = tuple(each.transpose(1, 2).shape if transposed and each.dim() == 3 else each.shape)
        if suffix == "weight_shape":
            shape, dtype = (COUNT, 2), torch.float32
        if suffix == "weight_global_scale":
            shape, kind = (COUNT, 2) if stem == "w13" else (COUNT,), "tensor"
        register(layer, f"{stem}_{suffix}", torch.ones(shape).to(dtype), kind, transposed)
    for name in (f"w13{UNSENT[0]}", f"w2{UNSENT[1]}"):
        register(layer, name, torch.full((COUNT, HIDDEN), 7, dtype=torch.int32), strategy, transposed)
    record_metadata_for_reloading(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def register(layer: Any, name: str, tensor: Tensor, kind: str, transposed: bool) -> None:
    parameter = nn.Parameter(tensor, requires_grad=False)
    parameter.weight_loader, parameter.quant_method = layer.weight_loader, kind
    if transposed:
        parameter.is_transposed = True
    layer.register_parameter(name, parameter)


def reload_by_loaders(layer: Any, tensors: dict[str, Tensor]) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(layer)
    for name, tensor in part_experts(tensors.items(), expert_stacks(EXPERTS, COUNT)):
        expert, leaf, suffix = name.removeprefix(f"{EXPERTS}.").split(".")
        parameter = f"{'w2' if leaf == 'down_proj' else 'w13'}_{suffix}"
        held = getattr(layer, parameter)
        held.weight_loader(held, tensor, parameter, shard_id=LEAVES[leaf], expert_id=int(expert), return_success=True)
    finalize_layerwise_reload(layer, SimpleNamespace(dtype=torch.bfloat16))


def reload_by_stacks(layer: Any, tensors: dict[str, Tensor]) -> bool:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from qarl.rollout.vllm.own_kernels.loading import load_expert_stacks

    initialize_layerwise_reload(layer)
    taken = load_expert_stacks(layer, {n.removeprefix(f"{EXPERTS}.").replace(".", "_"): t for n, t in tensors.items()})
    finalize_layerwise_reload(layer, SimpleNamespace(dtype=torch.bfloat16))
    return taken


@pytest.mark.parametrize(("name", "group", "strategy", "transposed"), CASES)
def test_stacks_load_the_same_tensors_as_vllms_loaders(name, group, strategy, transposed) -> None:
    first = published(name, group, 0)
    layer, other = (started(first, strategy, transposed) for _ in range(2))
    addresses = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    for seed in (1, 2):  # the second reload finds what the first one left
        tensors = published(name, group, seed)
        assert tensors.keys() == first.keys()
        reload_by_loaders(other, tensors)
        assert reload_by_stacks(layer, tensors)
        expected, found = dict(other.named_parameters()), dict(layer.named_parameters())
        assert found.keys() == expected.keys() and len(found) >= 6
        for parameter, tensor in found.items():
            if "_g_idx" in parameter or "_sort_" in parameter:
                assert not tensor.any()
            else:
                assert torch.equal(tensor.view(torch.uint8), expected[parameter].view(torch.uint8)), parameter
    assert addresses == {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}


def test_a_publish_gives_stacks_to_layers_and_calls_no_loader_of_experts(monkeypatch) -> None:
    import vllm.config

    monkeypatch.setattr(vllm.config, "set_current_vllm_config", lambda config: nullcontext())
    versions = [published("w4a16", 32, seed) for seed in range(2)]
    layer, other = (started(versions[0], "group", True) for _ in range(2))
    reload_by_loaders(layer, versions[0])
    model = model_of(layer)
    model.load_weights = lambda tensors: pytest.fail("vLLM's loaders are called")
    expected = [fingerprints(version.items()) for version in versions]
    held = LoadedModel(model, expected[0])
    assert held.opaque == (f"{EXPERTS}.routed_experts",)
    config = {"vllm_config": None, "model_config": SimpleNamespace(dtype=torch.bfloat16)}
    loader = loader_of(model, held, expected[0], **config)
    loader.load(versions[1])
    held.check(1, expected[1])
    reload_by_loaders(other, versions[1])
    for name, parameter in other.named_parameters():
        if "_g_idx" not in name and "_sort_" not in name:
            assert torch.equal(layer.get_parameter(name), parameter), name
    with pytest.raises(PublishError, match="routed_experts"):
        held.check(2, expected[0])  # sent again, and the layer stays as it was
