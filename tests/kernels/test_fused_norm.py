"""RMSNorm with residual and quantization, its backward, and column sums: float64, the plain-torch twin, bits."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON, QUIET, assert_rows_are_their_own, assert_same
from products import of_both_dtypes, random
from qarl_kernels import fused_norm, pointwise, quantize
from qarl_kernels.fused_norm import add_rms_norm, add_rms_norm_backward, rms_norm_again
from qarl_kernels.rows import MAX_ROW, VECTOR, backward_tile, row_tile, row_tiles
from qarl_kernels.token_sums import column_sum
from torch import Tensor

pytestmark = [NEEDS_TRITON, QUIET, pytest.mark.usefixtures("poisoned")]

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16]
ACTIVATIONS = ["int8", "fp8", "fp8_group"]
SHAPES = [(5, 40), (1, 96), (19, 33), (2, 2304), (0, 64), (300, 40)]


def _norm64(hidden: Tensor, weight: Tensor) -> Tensor:
    return weight * hidden / (hidden.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def _inputs(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    x = random(rows, columns, seed=0, device=device, dtype=dtype) * 3
    residual = random(rows, columns, seed=1, device=device, dtype=dtype)
    return x, residual, random(columns, seed=2, device=device, dtype=dtype)


@pytest.mark.parametrize("columns", [1, 40, 1000, 8960, MAX_ROW])
def test_tiles_hold_the_row_in_vectors_of_whole_warps(columns: int) -> None:
    for tile in (row_tile(columns), backward_tile(columns), *row_tiles(columns)):
        assert tile.lanes >= columns and (tile.chunks - 1) * tile.vectors * VECTOR < columns
        assert tile.vectors % 16 == 0 and tile.rows * tile.vectors == 32 * tile.warps <= 1024
    if columns > 1000:
        assert row_tile(columns).lanes <= 1.15 * columns


@pytest.mark.parametrize(("rows", "columns", "dtype"), of_both_dtypes(SHAPES))
def test_norm_is_its_formula_and_its_twin(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = _inputs(rows, columns, dtype, device)
    for other in (residual, None):
        result = add_rms_norm(x, other, weight, EPS)
        hidden = x if other is None else x + other
        assert torch.equal(result.hidden, hidden) and (other is not None or result.hidden is x)
        assert result.codes is None and result.scale is None
        inverse = 1 / (hidden.double().pow(2).mean(-1) + EPS).sqrt()
        # A sum of up to 2304 squares in float32, in pieces of eight and fewer: a few units of 2^-24.
        torch.testing.assert_close(result.inverse.double(), inverse, rtol=4e-7, atol=0)
        # Two roundings to 16 bits: after the norm and after the weight.
        eps = torch.finfo(dtype).eps
        expected = _norm64(hidden.double(), weight.double())
        torch.testing.assert_close(result.normed.double(), expected, rtol=1.01 * eps, atol=1e-6)
        # The twin's sum has another order: a value next to a rounding boundary may fall on its other side.
        twin = pointwise.rms_norm(hidden, None, weight, EPS)
        torch.testing.assert_close(result.normed, twin, rtol=2 * eps, atol=1e-6)
        assert (result.normed != twin).sum() <= 0.01 * twin.numel()
        assert torch.equal(rms_norm_again(result.hidden, result.inverse, weight), result.normed)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "columns"), [(19, 33), (2, 576)])
def test_codes_are_those_of_the_normed_row(rows: int, columns: int, activation: str, device: torch.device) -> None:
    """Also of a row of zeros and of rows that are not finite."""
    x, residual, weight = _inputs(rows, columns, torch.bfloat16, device)
    if rows > 4:
        x[0], x[3], residual[[0, 3]] = 0.0, 1e-30, 0.0
        x[1, 7], x[2, -1] = float("nan"), float("inf")
    plain = add_rms_norm(x, residual, weight, EPS)
    assert rows <= 4 or (plain.normed[1].isnan().all() and not plain.normed[0].any())
    codes, scale = quantize.activation_codes(plain.normed, activation)
    for want_normed in (True, False):
        result = add_rms_norm(x, residual, weight, EPS, activation, want_normed)
        assert_same(result.codes, codes.cpu())
        assert_same(result.scale, scale.cpu())
        assert_same(result.inverse, plain.inverse.cpu())
        assert_same(result.hidden, plain.hidden.cpu())
        assert (result.normed is not None) == want_normed
        if want_normed:
            assert_same(result.normed, plain.normed.cpu())
    again = add_rms_norm(plain.hidden, None, weight, EPS, activation)
    assert_same(again.normed, plain.normed.cpu())
    assert_same(again.codes, codes.cpu())


@pytest.mark.parametrize(("columns", "activation"), [(40, "int8"), (136, "fp8_group")])
def test_a_rows_bits_are_its_own_in_the_norm_and_in_its_gradient(columns: int, activation: str, device) -> None:
    x, residual, weight = _inputs(19, columns, torch.bfloat16, device)
    assert_rows_are_their_own(lambda x, residual: add_rms_norm(x, residual, weight, EPS, activation), x, residual)
    inverse = add_rms_norm(x, residual, weight, EPS).inverse[:, None]

    def backward(grad: Tensor, arriving: Tensor, inverse: Tensor) -> Tensor:
        into = torch.zeros(columns, device=device)
        return add_rms_norm_backward(grad, arriving, hidden[: len(grad)], inverse[:, 0].contiguous(), weight, into)

    hidden = x[:1].expand(19, columns).contiguous()
    assert_rows_are_their_own(backward, residual, x, inverse)


@pytest.mark.parametrize(("rows", "columns", "dtype"), of_both_dtypes([*SHAPES[:-1], (45, 96)]))
def test_gradients_are_those_of_float64(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = _inputs(rows, columns, dtype, device)
    grad_normed = random(rows, columns, seed=3, device=device, dtype=dtype)
    grad_hidden = random(rows, columns, seed=4, device=device, dtype=dtype)
    result = add_rms_norm(x, residual, weight, EPS)
    exact, exact_weight = result.hidden.double().requires_grad_(), weight.double().requires_grad_()
    normed = _norm64(exact, exact_weight)
    normed.backward(grad_normed.double())
    before = random(columns, seed=5, device=device)
    for arriving in (grad_hidden, None):
        grad_weight = before.clone()
        grad = add_rms_norm_backward(grad_normed, arriving, result.hidden, result.inverse, weight, grad_weight)
        expected = exact.grad if arriving is None else exact.grad + arriving.double()
        # One rounding to 16 bits; the rest is float32, where terms of size 10 may cancel.
        torch.testing.assert_close(grad.double(), expected, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5)
        torch.testing.assert_close(grad_weight.double(), before + exact_weight.grad, rtol=1e-5, atol=1e-5)


def test_gradients_are_the_same_in_every_run_and_with_few_programs(device: torch.device, monkeypatch) -> None:
    x, residual, weight = _inputs(70, 96, torch.bfloat16, device)
    result = add_rms_norm(x, residual, weight, EPS)
    sums, grads = [], []
    for programs in (528, 528, 16):
        monkeypatch.setattr(fused_norm, "PROGRAMS", programs)
        sums.append(torch.zeros(96, device=device))
        grads.append(add_rms_norm_backward(x, residual, result.hidden, result.inverse, weight, sums[-1]))
    assert torch.equal(sums[0], sums[1]) and torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])  # a row's gradient does not depend on the program that has it
    torch.testing.assert_close(sums[0], sums[2], rtol=1e-5, atol=1e-5)  # the order of 70 terms differs


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(0, 64), (1, 1), (37, 100), (700, 40), (129, 257)])
def test_column_sum_adds_what_float64_adds(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    x = random(rows, columns + 3, seed=0, device=device, dtype=dtype)[:, :columns]
    before = random(columns, seed=1, device=device)
    results = [before.clone() for _ in range(2)]
    for into in results:
        column_sum(x, into)
    # float32 sums of up to 700 terms of size 1.
    torch.testing.assert_close(results[0].double(), before + x.double().sum(0), rtol=1e-5, atol=3e-5)
    assert torch.equal(*results)
