"""qarl's experts for vLLM against the learner's products, one token and one expert at a time.

vLLM takes ten seconds to import, so only the process that runs a test of this file does it.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from qarl_formats.registry import make_scheme
from qarl_formats.weight import UNQUANTIZED, LowBitWeight, quantize_weight
from qarl_kernels import pointwise
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
COUNT, DTYPE = 5, torch.bfloat16
SCHEMES = [
    ("bf16", None, True),
    ("w4a16", 32, True),
    ("w4a16", -1, False),
    ("w4a8", 32, True),
    ("w8a8", None, True),
    ("fp8", None, True),
    ("fp8_block", None, True),
    ("nvfp4a16", None, True),
]
Weights = dict[str, list[LowBitWeight]]  # w1, w3 and w2 of each expert


def _sizes(name: str) -> tuple[int, int]:
    """Hidden and inner features; of whole blocks where a scheme has them."""
    return (128, 256) if name == "fp8_block" else (64, 96)


def _scheme(name: str, group: int | None, symmetric: bool):
    return UNQUANTIZED if name == "bf16" else make_scheme(name, group, symmetric)


def _weights(scheme, name: str, seed: int) -> Weights:
    (hidden, inner), generator = _sizes(name), torch.Generator().manual_seed(seed)
    shapes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
    masters = {
        leaf: [torch.randn(shape, generator=generator) * 0.1 for _ in range(COUNT)] for leaf, shape in shapes.items()
    }
    if not scheme.quantized:
        return {leaf: [LowBitWeight.of_values(master.to(DTYPE)) for master in each] for leaf, each in masters.items()}
    together = {"w2": scheme.shared(masters["w2"]), "w1": scheme.shared([*masters["w1"], *masters["w3"]])}
    shared = together | {"w3": together["w1"]}
    return {
        leaf: [quantize_weight(master, scheme, leaf, shared=shared[leaf]) for master in each]
        for leaf, each in masters.items()
    }


def _made(scheme, name: str) -> tuple[nn.Module, object]:
    from qarl.rollout.vllm.own_kernels.expert_kernels import ExpertsMethod

    layer, method = nn.Module(), ExpertsMethod(SimpleNamespace(tp_size=1), scheme)
    _create(layer, method, name)
    return layer, method


def _create(layer: nn.Module, method, name: str) -> None:
    """As vLLM makes a layer, and makes it anew when it reloads."""
    hidden, inner = _sizes(name)
    for parameter in list(layer._parameters):
        delattr(layer, parameter)
    method.create_weights(layer, COUNT, hidden, inner, DTYPE, global_num_experts=COUNT)
    for parameter in layer.parameters():
        if parameter.dtype.is_floating_point:
            parameter.data.fill_(float("nan"))


def _load(layer: nn.Module, method, weights: Weights, kernels: bool | None = None) -> None:
    """Through the weight loaders, the last expert first."""
    for leaf, each in weights.items():
        for expert in reversed(range(COUNT)):
            for suffix, tensor in each[expert].tensors.items():
                name = f"{'w2' if leaf == 'w2' else 'w13'}_{suffix}"
                parameter = getattr(layer, name)
                done = parameter.weight_loader(
                    parameter, tensor, name, shard_id=leaf, expert_id=expert, return_success=True
                )
                assert done is True
    method.process_weights_after_loading(layer, kernels)


def _expected(weights: Weights, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """Each token by itself, its experts in ascending order."""
    prepared = {leaf: [form.prepare(DTYPE) for form in each] for leaf, each in weights.items()}
    rows = []
    for token in range(len(x)):
        row, total = x[token : token + 1], torch.zeros(())
        for place in ids[token].argsort().tolist():
            gate, up, down = (prepared[leaf][int(ids[token, place])] for leaf in ("w1", "w3", "w2"))
            product = pointwise.silu(gate.matmul(row)) * up.matmul(row)
            total = total + down.matmul(product).float() * shares[token, place]
        rows.append(total.to(DTYPE))
    return torch.cat(rows)


def _stored(weights: Weights) -> dict[str, Tensor]:
    """The published tensors of each stack, under one another."""
    found = {}
    for stem, leaves in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        tensors = [weights[leaf][expert].tensors for expert in range(COUNT) for leaf in leaves]
        found |= {f"{stem}_{s}": torch.cat([t[s] for t in tensors]) for s in tensors[0] if s != "weight_shape"}
    return found


@pytest.mark.parametrize(("name", "group", "symmetric"), SCHEMES)
def test_experts_have_the_bits_of_their_own_products_and_give_back_what_was_loaded(name, group, symmetric) -> None:
    scheme, generator = _scheme(name, group, symmetric), torch.Generator().manual_seed(7)
    layer, method = _made(scheme, name)
    x = torch.randn(9, _sizes(name)[0], generator=generator).to(DTYPE)
    ids = torch.stack([torch.randperm(COUNT - 1, generator=generator)[:3] for _ in range(9)]).int()  # the last has none
    shares = torch.rand(9, 3, generator=generator)
    made = []
    for seed in (0, 1):  # a load, and a reload of other weights
        weights = _weights(scheme, name, seed)
        _load(layer, method, weights)
        assert torch.equal(method.apply(layer, x, shares, ids), _expected(weights, x, shares, ids))
        published, stored = method.published(layer), _stored(weights)
        assert published.keys() == stored.keys()
        for suffix, tensor in stored.items():
            assert torch.equal(published[suffix].to(tensor.dtype), tensor), suffix
        made.append({n: (p.shape, p.dtype) for n, p in layer.named_parameters()})
        _create(layer, method, name)
    assert made[0] == made[1]


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(("name", "group", "symmetric"), SCHEMES)
def test_other_weights_are_taken_as_they_are_published_where_the_loaded_ones_were(
    name, group, symmetric, kernels
) -> None:
    scheme = _scheme(name, group, symmetric)
    layer, method = _made(scheme, name)
    _load(layer, method, _weights(scheme, name, 0), kernels)
    places = {n: p.data_ptr() for n, p in layer.named_parameters()}
    weights = _weights(scheme, name, 1)
    method.take(layer, _stored(weights))
    assert {n: p.data_ptr() for n, p in layer.named_parameters()} == places
    held, (loaded, other) = dict(layer.named_parameters()), _made(scheme, name)
    _load(loaded, other, weights, kernels)
    for suffix, parameter in loaded.named_parameters():
        assert torch.equal(held[suffix].view(torch.uint8), parameter.view(torch.uint8)), suffix


@pytest.mark.parametrize(("name", "group"), [("bf16", None), ("w8a8", None)])
def test_kernels_multiply_the_same_experts_and_give_back_the_same_tensors(name, group) -> None:
    scheme, generator = _scheme(name, group, True), torch.Generator().manual_seed(8)
    layer, method = _made(scheme, name)
    weights = _weights(scheme, name, 2)
    _load(layer, method, weights, kernels=True)
    x = torch.randn(3, _sizes(name)[0], generator=generator).to(DTYPE)
    ids, shares = torch.tensor([[3, 1], [4, 3], [0, 3]]), torch.rand(3, 2, generator=generator)
    found, expected = method.apply(layer, x, shares, ids), _expected(weights, x, shares, ids)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
    published = method.published(layer)
    for suffix, tensor in _stored(weights).items():
        assert torch.equal(published[suffix].to(tensor.dtype), tensor), suffix


def test_an_operand_that_stands_for_no_stored_tensors_is_told() -> None:
    scheme = _scheme("w4a16", 32, True)
    layer, method = _made(scheme, "w4a16")
    _load(layer, method, _weights(scheme, "w4a16", 0))
    wide = next(p for n, p in layer.named_parameters() if n.startswith("w2_") and p.dtype == torch.float32)
    wide.data[COUNT, 3] += 0.01
    with pytest.raises(ValueError, match="is not what its codes and scales make"):
        method.published(layer)


def test_experts_with_different_global_scales_are_refused() -> None:
    scheme = _scheme("nvfp4a16", None, True)
    layer, method = _made(scheme, "nvfp4a16")
    weights = _weights(scheme, "nvfp4a16", 0)
    weights["w3"][2].tensors["weight_global_scale"] = weights["w3"][2].tensors["weight_global_scale"] * 2
    with pytest.raises(ValueError, match="different global scales"):
        _load(layer, method, weights)


def test_all_experts_of_a_layer_are_quantized_or_none() -> None:
    from qarl.rollout.vllm.own_kernels.expert_kernels import method_for

    layer, scheme = SimpleNamespace(moe_config=SimpleNamespace(num_experts=3)), make_scheme("w8a8")
    place = "model.layers.4.block_sparse_moe.experts"
    assert method_for(layer, place, scheme, ["lm_head"]).scheme is scheme
    assert method_for(layer, place, scheme, [r"re:.*layers\.4\.block_sparse_moe.*"]).scheme is UNQUANTIZED
    with pytest.raises(ValueError, match="ignore all of a layer, or none"):
        method_for(layer, place, scheme, [f"{place}.1.w2"])


@pytest.mark.parametrize(("tp", "whole"), [(2, COUNT), (1, 2 * COUNT)])
def test_experts_cut_over_gpus_are_refused(tp, whole) -> None:
    from qarl.rollout.vllm.own_kernels.expert_kernels import ExpertsMethod

    method = ExpertsMethod(SimpleNamespace(tp_size=tp), UNQUANTIZED)
    with pytest.raises(ValueError, match="tensor_parallel_size 1"):
        method.create_weights(nn.Module(), COUNT, 64, 96, DTYPE, global_num_experts=whole)
