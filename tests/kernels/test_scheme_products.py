"""Products of all registered schemes, dense and of experts, in plain torch and by Triton: values, bits, errors."""

import functools
from dataclasses import dataclass

import mixtures
import pytest
import torch
from kernel_harness import BY, NEEDS_TRITON, QUIET, assert_rows_are_their_own
from products import random
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.scheme import Codes, Scheme
from qarl_formats.weight import LowBitWeight, concatenate, quantize_weight
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from qarl_kernels.quantize import activation_codes
from torch import Tensor

pytestmark = [QUIET, pytest.mark.usefixtures("poisoned")]

BF16, EXPERTS = torch.bfloat16, 3
NAMES = [*scheme_names(), "w4a16 asymmetric", "w4a8 channel"]
SHAPES = {"small": (40, 96), "ragged": (136, 160)}  # N, K; of fp8_block two blocks each way, the last not whole
INPUTS = [  # dtype of the activations, how many rows, and whether there is a bias
    (torch.bfloat16, 17, False),
    (torch.float16, 5, True),
    (torch.float32, 5, True),
]


@dataclass
class Case:
    """A prepared weight (N, K), and the values of weight and activations that its product stands for."""

    weight: LowBitWeight
    exact: Tensor  # (N, K) float64: code * scale, and where activations are not quantized what the product makes of it

    def expected(self, x: Tensor) -> Tensor:
        """y in float64 without roundings but those of codes."""
        return _rounded(self.weight.scheme.name, x.cpu()) @ self.exact.t()


def _scheme(name: str, dtype: torch.dtype = BF16) -> Scheme:
    plain, _, kind = name.partition(" ")
    scheme = make_scheme(plain)
    group = (-1 if kind == "channel" else 32) if scheme.group_sizes else None
    scales = str(BF16 if dtype == torch.float32 else dtype).removeprefix("torch.")
    more = {"scale_dtype": scales} if scheme.scale_dtypes else {}
    return make_scheme(plain, group, symmetric=kind != "asymmetric", **more)


@functools.cache
def _case(name: str, dtype: torch.dtype, kernels: bool, device: torch.device, shape: str = "small") -> Case:
    scheme = _scheme(name, dtype)
    master = random(*SHAPES[shape], seed=2, device=device)
    if not scheme.quantized:
        weight = LowBitWeight.of_values(master.to(dtype))
        return Case(weight.prepare(dtype, kernels), weight.dequantize(torch.float64).cpu())
    weight = quantize_weight(master, scheme, "w", kernels)
    if scheme.activation is None:
        rounded = torch.float32 if name == "nvfp4a16" else dtype  # whose product rounds no weight
        return Case(weight.prepare(dtype, kernels), weight.dequantize(rounded).double().cpu())
    n, k = weight.shape
    codes, scale = weight.codes().double().cpu(), weight.tensors["weight_scale"].double().cpu()
    rows, columns = (128, 128) if name == "fp8_block" else (1, k // scale.shape[1])
    wide = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return Case(weight.prepare(dtype, kernels), codes * wide)


def _rounded(scheme: str, x: Tensor) -> Tensor:
    """What a product makes of x, in float64."""
    if make_scheme(scheme).activation is None:
        return x.double()
    quantize = quantize_activation_fp8 if scheme.startswith("fp8") else quantize_activation_int8
    parts = [quantize(part) for part in x.split(128 if scheme == "fp8_block" else x.shape[1], 1)]
    return torch.cat([codes.double() * scale.double() for codes, scale in parts], 1)


def _x(m: int, case: Case) -> Tensor:
    source = next(iter(case.weight.operands.values()))
    return random(m, case.weight.shape[1], seed=1, device=source.device, dtype=case.weight.dtype)


@pytest.mark.parametrize(("dtype", "m", "with_bias"), INPUTS)
@pytest.mark.parametrize("name", NAMES)
def test_product_is_its_formula_in_float64(device, name: str, dtype, m: int, with_bias: bool) -> None:
    """In plain torch, with which the kernels are compared below; they are compared with float64 tile by tile."""
    case = _case(name, dtype, False, device, "ragged" if m == 5 else "small")
    x, n = _x(m, case), case.weight.shape[0]
    bias = random(n, seed=5, device=device, dtype=dtype) if with_bias else None
    y = case.weight.matmul(x, bias)
    expected = case.expected(x) + (0 if bias is None else bias.double().cpu())
    assert y.dtype == dtype and y.shape == (m, n)
    # one rounding to dtype of a float32 result, whose own error is K * 2^-24 of terms under 100
    torch.testing.assert_close(y.double().cpu(), expected, rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("kernels", BY)
@pytest.mark.parametrize("name", NAMES)
def test_a_rows_bits_are_its_own_and_x_that_does_not_fit_is_refused(device, name: str, kernels: bool) -> None:
    case = _case(name, BF16, kernels, device)
    assert_rows_are_their_own(case.weight.matmul, x := _x(9, case))
    assert torch.equal(case.weight.matmul(x.t().contiguous().t()), case.weight.matmul(x))
    for shape in [(3, 104), (2, 3, 96)]:
        with pytest.raises(ValueError, match=r"x is \[.*reshape x"):
            case.weight.matmul(torch.zeros(shape, dtype=BF16, device=device))


@NEEDS_TRITON
@pytest.mark.parametrize(("name", "dtype"), [*zip(NAMES, [BF16, torch.float16] * 5, strict=False)])
def test_quantizing_dequantizing_and_products_of_both_ways_agree(device, name: str, dtype: torch.dtype) -> None:
    """Stored tensors and dequantized values to the bit; products up to the order of their sums."""
    case, plain = (_case(name, dtype, way, device, "ragged") for way in (True, False))
    bias = random(len(case.exact), seed=5, device=device, dtype=dtype)
    found, expected = (c.weight.matmul(_x(9, c), bias) for c in (case, plain))
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    found, expected = (c.weight.values(dtype) for c in (case, plain))
    assert torch.equal(found.float(), expected.float())
    if case.weight.scheme.quantized:
        for suffix, tensor in plain.weight.tensors.items():
            assert torch.equal(case.weight.tensors[suffix].view(torch.uint8), tensor.view(torch.uint8)), suffix


# --- experts


def _experts(name: str, device: torch.device) -> list[LowBitWeight]:
    """Weights (N, 160), quantized with what those of a stack share."""
    scheme, masters = _scheme(name), random(EXPERTS, 128 if name == "fp8_block" else 24, 160, seed=3, device=device)
    if not scheme.quantized:
        return [LowBitWeight.of_values(values) for values in masters.bfloat16()]
    return [quantize_weight(master, scheme, "w", False, scheme.shared(masters)) for master in masters]


@pytest.mark.parametrize(("kernels", "gathered"), [pytest.param(True, True, marks=NEEDS_TRITON), (False, False)])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_bits_of_its_experts_own_product(device, name: str, kernels: bool, gathered: bool) -> None:
    groups, weights = mixtures.grouped(6, 2, EXPERTS, device), _experts(name, device)
    x = random(6 if gathered else 12, 160, seed=9, device=device, dtype=BF16)
    whole, own = concatenate(weights).prepare(BF16, kernels), [weight.prepare(BF16, kernels) for weight in weights]
    y = whole.matmul(x, None, groups, gathered)
    assert torch.equal(y, mixtures.by_expert(groups, gathered, x, lambda rows, expert: own[expert].matmul(rows)))
    none = x[:0], None, mixtures.grouped(0, 2, EXPERTS, device), gathered
    assert whole.matmul(*none).shape == (0, len(own[0].dequantize(BF16)))
    if kernels and whole.scheme.input_codes:  # activations that are quantized already
        codes = Codes(*activation_codes(x, whole.scheme.input_codes), BF16)
        assert torch.equal(whole.matmul(codes, None, groups, True), y)


def test_rows_and_experts_that_do_not_fit_or_would_share_stored_values_are_refused(device) -> None:
    groups, x = mixtures.grouped(3, 2, EXPERTS, device), torch.zeros(3, 160, dtype=BF16, device=device)
    weight = concatenate(_experts("w8a8", device)).prepare(BF16, False)
    with pytest.raises(ValueError, match=r"x is \[2, 160\], but the experts take \(3, 160\)"):
        weight.matmul(x[:2], None, groups, True)
    with pytest.raises(ValueError, match="72 rows are not the weights of 7 experts"):
        weight.matmul(x, None, mixtures.grouped(3, 2, 7, device), True)
    for name, n, message in [
        ("fp8_block", 40, "40 output features would share stored values of fp8_block, which span 128"),
        ("w4a16 asymmetric", 20, "20 output features would share stored values of w4a16, which span 8"),
    ]:
        weight = quantize_weight(random(EXPERTS * n, 160, seed=3, device=device), _scheme(name), "w")
        with pytest.raises(ValueError, match=message):
            weight.prepare(BF16, False).matmul(x, None, groups, True)
