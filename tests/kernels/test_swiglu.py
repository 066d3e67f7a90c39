"""SiLU times the linear half, its quantization and its backward: float64, the plain-torch twin, bits."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON, QUIET, assert_rows_are_their_own, assert_same
from products import of_both_dtypes, random
from qarl_kernels import pointwise, quantize
from qarl_kernels.swiglu import swiglu, swiglu_backward
from torch import Tensor

pytestmark = [NEEDS_TRITON, QUIET, pytest.mark.usefixtures("poisoned")]

ACTIVATIONS = ["int8", "fp8", "fp8_group"]
SHAPES = [(5, 40), (19, 33), (2, 2304), (0, 48)]


def _gate_up(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    x = random(rows, 2 * columns, seed=0, device=device) * 4
    x[:, 0], x[:, 1], x[:, 2], x[:, 3] = 200.0, -200.0, 0.0, -30.0  # gates
    return x.to(dtype)


def _twin(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return pointwise.silu(gate.contiguous()) * up


@pytest.mark.parametrize(("rows", "columns", "dtype"), of_both_dtypes(SHAPES))
def test_product_is_its_formula_and_its_twin(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = _gate_up(rows, columns, dtype, device)
    result = swiglu(gate_up)
    assert result.codes is None and result.scale is None
    gate, up = gate_up.double().chunk(2, -1)
    eps = torch.finfo(dtype).eps
    # Two roundings to 16 bits; below its normal numbers (6e-5) float16 has steps of 6e-8, times an up of 16 or less.
    torch.testing.assert_close(
        result.product.double(), gate * torch.sigmoid(gate) * up, rtol=1.01 * eps, atol=1e-6 if eps < 1e-3 else 1e-30
    )
    # exp and the division may differ in float32's last bits, and so on which side of a boundary a value falls.
    twin = _twin(gate_up)
    torch.testing.assert_close(result.product, twin, rtol=2 * eps, atol=1e-6)
    assert (result.product != twin).sum() <= 0.01 * twin.numel()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "columns"), [(19, 33), (2, 576), (0, 48)])
def test_codes_are_those_of_the_product(rows: int, columns: int, activation: str, device: torch.device) -> None:
    gate_up = _gate_up(rows, columns, torch.bfloat16, device)
    if rows > 4:
        gate_up[1], gate_up[2, 5], gate_up[3, columns + 5] = 0.0, float("nan"), float("inf")
    plain = swiglu(gate_up).product
    codes, scale = quantize.activation_codes(plain, activation)
    for want_product in (True, False):
        result = swiglu(gate_up, activation, want_product)
        assert_same(result.codes, codes.cpu())
        assert_same(result.scale, scale.cpu())
        assert (result.product is not None) == want_product
        if want_product:
            assert_same(result.product, plain.cpu())


@pytest.mark.parametrize(("rows", "columns", "dtype"), of_both_dtypes([*SHAPES, (300, 40)]))
def test_gradients_are_those_of_float64(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = _gate_up(rows, columns, dtype, device)
    grad = random(rows, columns, seed=1, device=device, dtype=dtype)
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    (gate * torch.sigmoid(gate) * up).backward(grad.double())
    result = gate_up.clone()
    assert torch.equal(swiglu_backward(grad, result), swiglu(gate_up).product)
    # Two roundings: of silu(gate), of the result; near its zero at -1.28 the slope of SiLU loses digits of float32.
    torch.testing.assert_close(result.double(), exact.grad, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("activation", ["int8", "fp8_group"])
def test_a_rows_bits_are_its_own(activation: str, device: torch.device) -> None:
    gate_up = _gate_up(19, 200, torch.bfloat16, device)
    assert_rows_are_their_own(lambda x: swiglu(x, activation), gate_up)


def test_a_rows_gradient_is_its_own(device: torch.device) -> None:
    gate_up = _gate_up(19, 200, torch.bfloat16, device)
    grad = random(19, 200, seed=1, device=device, dtype=torch.bfloat16)

    def both(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.cat([x, x], 1)[:, : x.shape[1]]
        return own, swiglu_backward(grad, own)

    assert_rows_are_their_own(both, gate_up, grad)
