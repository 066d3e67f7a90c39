"""The weight object: parts that share memory, the default product of a scheme, and ordinary products."""

import pytest
import torch
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.scheme import Scheme, TensorSpec
from qarl_formats.weight import LowBitWeight, can_concatenate, concatenate, ordinary_weight, quantize_weight
from qarl_kernels.moe.reference import groups_of
from torch import Tensor

K = 160


def made(scheme: Scheme, rows: int, seed: int = 0, shared: Tensor | None = None) -> LowBitWeight:
    master = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))
    if not scheme.quantized:
        return LowBitWeight.of_values(master.bfloat16())
    return quantize_weight(master, scheme, "w", shared=shared)


def scheme_named(name: str) -> Scheme:
    return make_scheme(name, 32 if make_scheme(name).group_sizes else None)


@pytest.mark.parametrize("name", scheme_names())
def test_parts_share_memory_and_make_up_the_whole_again(name: str) -> None:
    scheme, widths = scheme_named(name), (128, 256, 40)
    whole = made(scheme, sum(widths))
    parts = whole.split(widths)
    again = concatenate(parts)
    assert can_concatenate(parts) and again.shape == whole.shape and [part.shape[0] for part in parts] == list(widths)
    for suffix, tensor in whole.tensors.items():
        assert torch.equal(again.tensors[suffix].view(torch.uint8), tensor.view(torch.uint8)), suffix
        if suffix != "weight_shape":
            assert again.tensors[suffix].data_ptr() == parts[0].tensors[suffix].data_ptr() == tensor.data_ptr()
    values = [part.dequantize(torch.float32) for part in parts]
    assert torch.equal(torch.cat(values), whole.dequantize(torch.float32))


def test_weights_that_differ_cannot_be_concatenated() -> None:
    w8a8, nvfp4 = make_scheme("w8a8"), make_scheme("nvfp4a16")
    assert not can_concatenate([made(w8a8, 8), LowBitWeight.of_values(torch.zeros(8, K))])
    assert not can_concatenate([made(w8a8, 8), quantize_weight(torch.zeros(8, 2 * K), w8a8, "w")])
    assert not can_concatenate([made(make_scheme("fp8_block"), 64), made(make_scheme("fp8_block"), 64)])
    assert not can_concatenate([made(nvfp4, 8, seed=1), made(nvfp4, 8, seed=2)])
    scale = torch.full((1,), 500.0)
    assert can_concatenate([made(nvfp4, 8, seed=1, shared=scale), made(nvfp4, 8, seed=2, shared=scale.clone())])


class Halves(Scheme):
    """A scheme that defines only how a weight is stored: the sign of each value, and a scale per row."""

    name, description, weight_bits, weight_type, tolerance = "halves", "signs and a scale per row", 8, "int", 0.1

    def tensor_specs(self, out_features: int, in_features: int, unpacked: bool = False) -> dict[str, TensorSpec]:
        return {
            "weight": TensorSpec((out_features, in_features), "int8"),
            "weight_scale": TensorSpec((out_features, 1), "bfloat16"),
        }

    def quantize(self, weight, kernels=False, shared=None):
        scale = weight.abs().mean(-1, keepdim=True).bfloat16()
        return {"weight": weight.sign().to(torch.int8), "weight_scale": scale}, (~weight.isfinite()).sum()

    def dequantize(self, tensors, shape, dtype, kernels=False):
        return (tensors["weight"].float() * tensors["weight_scale"].float()).to(dtype)


def test_a_scheme_without_a_product_multiplies_its_dequantized_values() -> None:
    weight = made(Halves(), 3 * 24).prepare(torch.bfloat16)
    values = LowBitWeight.of_values(weight.dequantize(torch.bfloat16)).prepare(torch.bfloat16)
    x = torch.randn(6, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(weight.matmul(x), values.matmul(x))
    assert torch.equal(weight.values(torch.bfloat16), values.values(torch.bfloat16))
    assert all(torch.equal(tensor, weight.tensors[suffix]) for suffix, tensor in weight.stored().items())
    groups = groups_of(torch.tensor([[0, 2], [1, 2], [0, 1], [0, 1], [1, 2], [0, 2]]), 3)
    assert torch.equal(weight.matmul(x, None, groups, True), values.matmul(x, None, groups, True))


def test_an_ordinary_product_is_the_frameworks_on_rounded_activations() -> None:
    w8a8, x = make_scheme("w8a8"), torch.randn(5, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, bias = made(w8a8, 24).dequantize(torch.bfloat16), torch.randn(24).bfloat16()
    for imitated, read in ((None, x), (w8a8, w8a8.rounded_input(x))):
        weight = ordinary_weight(values, imitated)
        expected = torch.nn.functional.linear(read.float(), values.float(), bias.float()).bfloat16()
        assert torch.equal(weight.matmul(x, bias), expected) and weight.input_codes is None
        assert torch.equal(weight.values(torch.bfloat16), values.float())
