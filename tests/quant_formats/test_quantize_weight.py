"""Codes, scales and zero points against the compressed-tensors library, bit for bit."""

import itertools

import pytest
import torch
from compressed_tensors.quantization.lifecycle.forward import quantize
from hard_weights import ADVERSARIAL, N, normal
from library_oracle import library_dequantized, library_scheme, library_tensors
from qarl_formats.registry import make_scheme
from qarl_formats.scheme import SCALE_DTYPES
from qarl_formats.weight import codes_changed, quantize_weight


def _scheme_id(scheme):
    group = "channel" if scheme.group_size is None else f"g{scheme.group_size}"
    return f"{scheme.name}-{group}-{'sym' if scheme.symmetric else 'asym'}-{scheme.scale_dtype}"


KINDS = [  # each with every dtype of scales
    *([make_scheme("w4a16", g, scale_dtype=d) for d in SCALE_DTYPES] for g in (32, 64, 128, -1)),
    *([make_scheme("w4a16", g, False, scale_dtype=d) for d in SCALE_DTYPES] for g in (32, 128, -1)),
    *([make_scheme(name, scale_dtype=d) for d in SCALE_DTYPES] for name in ("w8a8", "fp8", "fp8_block")),
    [make_scheme("w4a8", 32)],
    [make_scheme("w4a8", -1)],
]
SCHEMES = [kind[i % len(kind)] for i, kind in enumerate(KINDS)]


# Every kind of scheme and every dtype of scales meet every case; a kind and a case meet with one dtype.
MET = [(kind[(i + j) % len(kind)], case) for i, kind in enumerate(KINDS) for j, case in enumerate(ADVERSARIAL)]


@pytest.mark.parametrize(("scheme", "case"), MET, ids=lambda it: it if isinstance(it, str) else _scheme_id(it))
def test_stored_and_dequantized_tensors_equal_the_library(scheme, case):
    weight = ADVERSARIAL[case].clone()
    expected = library_tensors(ADVERSARIAL[case], scheme)
    quantized = quantize_weight(weight, scheme, "w")
    assert torch.equal(weight, ADVERSARIAL[case]), "the master is left as it was"
    tensors = quantized.tensors
    assert tensors.keys() == expected.keys()
    for suffix, tensor in tensors.items():
        want = expected[suffix]
        assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape), suffix
        if tensor.dtype == torch.float8_e4m3fn:  # as bytes, so that +0 and -0 differ
            tensor, want = tensor.view(torch.uint8), want.view(torch.uint8)
        assert torch.equal(tensor, want), suffix
    dtype = getattr(torch, scheme.scale_dtype)
    assert torch.equal(quantized.dequantize(dtype), library_dequantized(tensors, scheme))


@pytest.mark.parametrize(
    ("shape", "scale_dtype"),
    [*zip([(1, 1), (7, 130), (128, 128), (129, 257), (200, 300), (384, 96)], [*SCALE_DTYPES] * 2, strict=True)],
)
def test_blocks_that_128_does_not_divide_equal_the_library(shape, scale_dtype):
    scheme = make_scheme("fp8_block", scale_dtype=scale_dtype)
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 1, shape[1])
    quantized = quantize_weight(weight, scheme, "w")
    expected = library_tensors(weight, scheme)
    assert torch.equal(quantized.tensors["weight"].view(torch.uint8), expected["weight"].view(torch.uint8))
    assert torch.equal(quantized.tensors["weight_scale"], expected["weight_scale"])
    found = quantized.dequantize(getattr(torch, scale_dtype))
    codes, scale = quantized.tensors["weight"].double(), quantized.tensors["weight_scale"].double()
    wide = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    assert torch.equal(found, (codes * wide).float().to(found.dtype))


@pytest.mark.parametrize(("scheme_name", "case"), [*zip(itertools.cycle(["w4a16", "w4a8"]), ADVERSARIAL, strict=False)])
def test_symmetric7_is_absmax_over_7_on_plus_minus_7(scheme_name, case):
    scheme = make_scheme(scheme_name, 32, grid="symmetric7")
    weight = ADVERSARIAL[case]
    quantized = quantize_weight(weight, scheme, "w")
    # The library has no such grid: its scale is absmax / 7 in fp32, its codes are the library's for that scale.
    scale = (weight.unflatten(-1, (-1, 32)).abs().amax(-1) / torch.tensor(7.0)).to(torch.bfloat16)
    scale[scale == 0] = torch.finfo(torch.bfloat16).eps
    codes = quantize(weight, scale, None, library_scheme(make_scheme("w4a16", 32)).weights, torch.int8).clamp(min=-7)
    assert torch.equal(quantized.tensors["weight_scale"], scale)
    assert torch.equal(quantized.codes(), codes)


def test_symmetric7_never_stores_minus_8_when_the_scale_saturates():
    quantized = quantize_weight(torch.full((1, 32), -1e6), make_scheme("w4a16", 32, True, "symmetric7", "float16"), "w")
    assert quantized.codes().min() == -7


@pytest.mark.parametrize("scheme", SCHEMES, ids=_scheme_id)
def test_nonfinite_master_is_an_error_that_names_the_tensor(scheme):
    weight = normal(0)
    weight[3, 17], weight[4, 2] = float("nan"), float("-inf")
    with pytest.raises(ValueError, match=r"^layers\.0\.q_proj: 2 of 6144 values are NaN or infinite"):
        quantize_weight(weight, scheme, "layers.0.q_proj")


def test_group_size_that_does_not_divide_is_an_error_that_names_the_tensor():
    with pytest.raises(ValueError, match=r"^q_proj: group_size 64 does not divide its 96 input features"):
        quantize_weight(torch.zeros(8, 96), make_scheme("w4a16", 64), "q_proj")


@pytest.mark.parametrize("scheme", SCHEMES, ids=_scheme_id)
def test_codes_changed_counts_single_codes_of_each_weight_of_a_stack(scheme):
    before, after = (quantize_weight(normal(3) + noise * normal(4), scheme, "w") for noise in (0, 0.2))
    differ = before.codes().view(torch.uint8) != after.codes().view(torch.uint8)
    for widths in ([N], [8, 8, 8], [16, 3, 5]):
        expected = [int(part.sum()) for part in differ.split(widths)]
        assert codes_changed(before, after, widths).tolist() == expected and min(expected) > 0


def test_codes_changed_refuses_another_scheme():
    quantized = quantize_weight(normal(3), make_scheme("w4a16", 32), "w")
    with pytest.raises(ValueError, match="cannot be compared"):
        codes_changed(quantized, quantize_weight(normal(3), make_scheme("w4a16", 64), "w"))
