"""Products of all registered schemes, in plain torch and by Triton: values, batch invariance, errors."""

import functools
from dataclasses import dataclass

import pytest
import torch
from products import random
from qarl_formats.registry import make_scheme, scheme_class, scheme_names
from qarl_formats.weight import LowBitWeight, quantize_weight
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from qarl_kernels.launch import INTERPRETED
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned")

GROUP = 32
NAMES = [*scheme_names(), "w4a16 asymmetric"]
SHAPES = {"small": (40, 96), "ragged": (136, 160)}  # N, K; of fp8_block two blocks each way, the last not whole
INPUTS = [  # dtype of the activations, how many rows, and whether there is a bias
    (torch.bfloat16, 0, False),
    (torch.bfloat16, 17, False),
    (torch.float16, 5, True),
    (torch.float32, 5, True),
]
RUNNABLE = INTERPRETED or torch.cuda.is_available()
BY = [pytest.param(True, marks=pytest.mark.skipif(not RUNNABLE, reason="needs TRITON_INTERPRET=1 or a GPU")), False]


@dataclass
class Case:
    """A prepared weight (N, K), and the values of weight and activations that its product stands for."""

    weight: LowBitWeight
    exact: Tensor  # (N, K) float64: code * scale, and where activations are not quantized what the product makes of it

    def expected(self, x: Tensor) -> Tensor:
        """y in float64 without roundings but those of codes."""
        return _rounded(self.weight.scheme.name, x.cpu()) @ self.exact.t()


@functools.cache
def _case(name: str, dtype: torch.dtype, kernels: bool, device: torch.device, shape: str = "small") -> Case:
    scheme_name, _, kind = name.partition(" ")
    group = GROUP if make_scheme(scheme_name).group_sizes else None
    scale_dtype = {"scale_dtype": _scale_dtype(dtype)} if scheme_class(scheme_name).scale_dtypes else {}
    scheme = make_scheme(scheme_name, group, symmetric=kind != "asymmetric", **scale_dtype)
    master = random(*SHAPES[shape], seed=2, device=device)
    if not scheme.quantized:
        weight = LowBitWeight.of_values(master.to(dtype))
        return Case(weight.prepare(dtype, kernels), weight.dequantize(torch.float64).cpu())
    weight = quantize_weight(master, scheme, "w", kernels)
    if scheme.activation is None:
        rounded = torch.float32 if scheme_name == "nvfp4a16" else dtype  # whose product rounds no weight
        return Case(weight.prepare(dtype, kernels), weight.dequantize(rounded).double().cpu())
    n, k = weight.shape
    codes, scale = weight.codes().double().cpu(), weight.tensors["weight_scale"].double().cpu()
    rows, columns = (128, 128) if scheme_name == "fp8_block" else (1, k // scale.shape[1])
    wide = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return Case(weight.prepare(dtype, kernels), codes * wide)


def _scale_dtype(dtype: torch.dtype) -> str:
    return "bfloat16" if dtype == torch.float32 else str(dtype).removeprefix("torch.")


def _rounded(scheme: str, x: Tensor) -> Tensor:
    """What a product makes of x, in float64."""
    if make_scheme(scheme).activation is None:
        return x.double()
    quantize = quantize_activation_fp8 if scheme.startswith("fp8") else quantize_activation_int8
    parts = [quantize(part) for part in x.split(128 if scheme == "fp8_block" else x.shape[1], 1)]
    return torch.cat([codes.double() * scale.double() for codes, scale in parts], 1)


def _x(m: int, case: Case, seed: int = 1) -> Tensor:
    source = next(iter(case.weight.operands.values()))
    return random(m, case.weight.shape[1], seed=seed, device=source.device, dtype=case.weight.dtype)


@pytest.mark.parametrize(("dtype", "m", "with_bias"), INPUTS)
@pytest.mark.parametrize("kernels", BY)
@pytest.mark.parametrize("name", NAMES)
def test_product_is_its_formula_in_float64(device, name: str, kernels: bool, dtype, m: int, with_bias: bool) -> None:
    if kernels and dtype == torch.float32:
        pytest.skip("kernels take activations of 16 bits")
    case = _case(name, dtype, kernels, device, "ragged" if m == 5 else "small")
    x, n = _x(m, case), case.weight.shape[0]
    bias = random(n, seed=5, device=device, dtype=dtype) if with_bias else None
    y = case.weight.matmul(x, bias)
    expected = case.expected(x) + (0 if bias is None else bias.double().cpu())
    assert y.dtype == dtype and y.shape == (m, n)
    # one rounding to dtype of a float32 result, whose own error is K * 2^-24 of terms under 100
    torch.testing.assert_close(y.double().cpu(), expected, rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("kernels", BY)
@pytest.mark.parametrize("name", NAMES)
def test_rows_keep_their_bits_in_every_batch_and_layout(device, name: str, kernels: bool) -> None:
    case = _case(name, torch.bfloat16, kernels, device, "ragged")
    x, weight = _x(35, case), case.weight
    whole = weight.matmul(x)
    for start, rows in [(0, 1), (5, 18)]:
        assert torch.equal(weight.matmul(x[start : start + rows]), whole[start : start + rows])
    few = x[30:]
    columns, wide = few.t().contiguous().t(), torch.cat([few, few], 1)[:, : x.shape[1]]
    assert torch.equal(weight.matmul(columns), whole[30:]) and torch.equal(weight.matmul(wide), whole[30:])


@pytest.mark.skipif(not RUNNABLE, reason="needs TRITON_INTERPRET=1 or a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_quantizing_dequantizing_and_products_of_both_ways_agree(device, name: str) -> None:
    """Stored tensors and dequantized values to the bit; products up to the order of their sums."""
    case, plain = (_case(name, torch.bfloat16, way, device, "ragged") for way in (True, False))
    found, expected = (c.weight.matmul(_x(9, c)) for c in (case, plain))
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)
    found, expected = (c.weight.values(torch.bfloat16) for c in (case, plain))
    assert torch.equal(found.float(), expected.float())
    if case.weight.scheme.quantized:
        for suffix, tensor in plain.weight.tensors.items():
            assert torch.equal(case.weight.tensors[suffix].view(torch.uint8), tensor.view(torch.uint8)), suffix


@pytest.mark.parametrize("kernels", BY)
@pytest.mark.parametrize("name", NAMES)
def test_x_that_does_not_fit_is_refused(device, name: str, kernels: bool) -> None:
    case = _case(name, torch.bfloat16, kernels, device)
    for shape in [(3, 104), (2, 3, 96), (96,)]:
        with pytest.raises(ValueError, match=r"x is \[.*reshape x"):
            case.weight.matmul(torch.zeros(shape, dtype=torch.bfloat16, device=device))
