"""The quantized linear's straight-through backward against its explicit formula."""

import pytest
import torch
from policy_models import OneLinear
from qarl_formats.registry import make_scheme, scheme_class, scheme_names
from qarl_formats.weight import LowBitWeight, ordinary_weight, quantize_weight
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from torch import Tensor, nn

from qarl.policy.linear import PackedLinear, WeightSet

N, K, GROUP = 24, 64, 32
SCHEMES = list(scheme_names())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUANTIZED_INPUTS = [
    ("w8a8", quantize_activation_int8),
    ("fp8", quantize_activation_fp8),
    ("fp8_block", quantize_activation_fp8),  # K is less than a block
    ("w4a8", quantize_activation_int8),
]


def _linear(scheme_name: str, dtype: torch.dtype, learner: str = "aligned", dequantize_input: bool = False):
    """(A linear that reads the learner's weight, W_deq (N, K) in dtype)."""
    torch.manual_seed(0)
    linear = nn.Linear(K, N)
    scheme = make_scheme(scheme_name, GROUP if scheme_name[:2] == "w4" else None)
    master = linear.weight.detach()
    quantized = scheme.quantized
    published = quantize_weight(master, scheme, "w") if quantized else LowBitWeight.of_values(master.to(dtype))
    values = published.dequantize(dtype)
    operand = {
        "aligned": lambda: published.prepare(dtype),
        "fake_quant": lambda: ordinary_weight(values, scheme),
        "full_precision": lambda: ordinary_weight(master.to(dtype)),
    }[learner]()
    return OneLinear(linear, operand, dtype, dequantize_input), values


def _x(dtype: torch.dtype) -> Tensor:
    return torch.randn(9, K, generator=torch.Generator().manual_seed(1)).to(dtype)


def _bias(linear: OneLinear) -> Tensor:
    return linear.weights.linears[linear.linear][0].bias.double()


def _backward(linear: OneLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dy) of one backward with random dy."""
    x = x.clone().requires_grad_()
    y = linear(x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    y.backward(grad)
    return x.grad, grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("learner", ["aligned", "fake_quant"])
@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_backward_is_straight_through_with_dequantized_weights(scheme: str, learner: str, dtype: torch.dtype) -> None:
    linear, values = _linear(scheme, dtype, learner)
    x = _x(dtype)
    if learner == "fake_quant":  # the aligned product is a kernel's own, see test_scheme_products
        rounded = linear.operand.rounded_input(x)
        assert torch.equal(rounded, x) == (not scheme_class(scheme).activation)
        expected = rounded.double() @ values.double().t() + _bias(linear)
        torch.testing.assert_close(linear(x).double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    dx, dy = _backward(linear, x)
    # dx is rounded to dtype once; dW and db are float32 sums over 9 rows
    torch.testing.assert_close(dx.double(), dy.double() @ values.double(), rtol=torch.finfo(dtype).eps, atol=1e-5)
    torch.testing.assert_close(linear.weight.grad.double(), dy.double().t() @ x.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.bias.grad.double(), dy.double().sum(0), rtol=1e-5, atol=1e-5)
    linear.weight.grad = linear.bias.grad = None
    _backward(linear, x[:0])
    assert not linear.weight.grad.any() and not linear.bias.grad.any(), "no rows give a gradient of zeros"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8"])
def test_full_precision_learner_runs_on_the_rounded_master(scheme: str, dtype: torch.dtype) -> None:
    linear, _ = _linear(scheme, dtype, "full_precision")
    x, weight = _x(dtype), linear.weight.detach().to(dtype).double()
    expected = x.double() @ weight.t() + _bias(linear)
    torch.testing.assert_close(linear(x).double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    dx, dy = _backward(linear, x)
    torch.testing.assert_close(dx.double(), dy.double() @ weight, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("learner", ["aligned", "fake_quant"])
@pytest.mark.parametrize(("scheme", "quantizer"), QUANTIZED_INPUTS)
def test_ste_input_dequantized_gives_the_weight_gradient_of_the_rounded_input(scheme, quantizer, learner) -> None:
    linear, _ = _linear(scheme, torch.float32, learner, dequantize_input=True)
    x = _x(torch.float32)
    _, dy = _backward(linear, x)
    codes, scale = quantizer(x)
    rounded = codes.double() * scale.double()
    torch.testing.assert_close(linear.weight.grad.double(), dy.double().t() @ rounded, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(linear.weight.grad.double(), dy.double().t() @ x.double(), rtol=1e-5, atol=1e-5)


def test_a_linear_reads_the_weight_and_bias_that_it_is_given() -> None:
    linear, values = _linear("w4a16", torch.float32, "full_precision")
    x, weight = _x(torch.float32), LowBitWeight.of_values(values).prepare(torch.float32)
    bias = linear.bias.detach() + 1.0
    own, found = linear(x), linear.linear(x, linear.with_weight(weight, bias))
    assert torch.equal(found, weight.matmul(x, bias)) and not torch.equal(found, own)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_packed_linear_has_the_bits_of_its_layers(scheme: str) -> None:
    alone = [_linear(scheme, torch.bfloat16)[0] for _ in "qkv"]
    masters, biases = [one.weight for one in alone], [one.bias for one in alone]
    packed = PackedLinear(tuple("qkv"), (N,) * 3, tuple(masters), tuple(biases))
    parts = packed.parts([one.operand for one in alone], torch.cat([bias.detach().bfloat16() for bias in biases]))
    x = _x(torch.bfloat16).requires_grad_()
    y = packed(x, WeightSet({packed: parts}, {}, torch.empty(0)))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = torch.autograd.grad(y, [x, *masters, *biases], dy)
    outputs = [one(x) for one in alone]
    expected = torch.autograd.grad(torch.cat(outputs, -1), [x, *masters, *biases], dy)
    assert torch.equal(y, torch.cat(outputs, -1))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
