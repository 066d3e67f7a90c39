"""Backward products from FP8 operands: their codes against plain torch bit for bit, products against float64."""

import pytest
import torch
from kernel_harness import QUIET
from products import random, relative_error
from qarl_kernels import fp8_backward
from qarl_kernels.fp8_backward import Codes, add_product, columns_of, input_grad_of, quantize, transpose
from qarl_kernels.launch import INTERPRETED
from torch import Tensor

CAPABLE = INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9))
pytestmark = [
    pytest.mark.skipif(not CAPABLE, reason="needs TRITON_INTERPRET=1 or a GPU with FP8"),
    pytest.mark.usefixtures("poisoned"),
    QUIET,
]

# (tokens, output features, input features): ragged everywhere, one token
SHAPES = [(133, 72, 40), (1, 40, 24)]
CASES = [(*SHAPES[0], torch.bfloat16), (*SHAPES[0], torch.float16), (*SHAPES[1], torch.bfloat16)]
E4M3 = torch.float8_e4m3fn
# e4m3 halves a step of 2^-3 of each value's binade: 2.6 % root mean square for one operand, 3.7 % for two
ONE_OPERAND, BOTH = 0.028, 0.040


def input_grad(dy: Tensor, plain: Tensor, scale: Tensor | None = None) -> Tensor:
    weight = transpose(plain, scale)
    rows, _ = quantize(dy, weight.factor)
    return input_grad_of(rows, weight, dy.dtype)


def add_weight_grad(dy: Tensor, x: Tensor, into: Tensor) -> None:
    add_product(columns_of(dy), columns_of(x), into)


def both(dy: Tensor, x: Tensor, plain: Tensor, into: Tensor) -> Tensor:
    """dx, with dW added to `into`, from one quantization of dy."""
    weight = transpose(plain, None)
    rows, columns = quantize(dy, weight.factor)
    add_product(columns, columns_of(x), into)
    return input_grad_of(rows, weight, dy.dtype)


@pytest.fixture(autouse=True)
def tiles_of_its_size(monkeypatch) -> None:
    """The interpreter has tiles of which the small cases here make several."""
    if INTERPRETED:
        monkeypatch.setattr(fp8_backward, "WEIGHT_TILES", (fp8_backward.Tile("x_first", 64, 64, 64),))
        monkeypatch.setattr(fp8_backward, "EXTENTS", {"STRIP": 64, "BLOCK_R": 32, "BLOCK_C": 64})
        monkeypatch.setattr(fp8_backward, "CODES", {"BLOCK_R": 64, "BLOCK_C": 32})


def _case(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    return (
        random(m, n, seed=1, device=device).mul_(1e-4).to(dtype),
        random(m, k, seed=2, device=device, dtype=dtype),
        random(n, k, seed=3, device=device).mul_(0.05).to(dtype),
    )


def _rows_twin(x: Tensor) -> Codes:
    absmax = x.float().abs().amax(-1, keepdim=True)
    scale = (absmax / torch.full_like(absmax, 448.0)).clamp_(min=2.0**-120)
    return Codes((x.float() * (torch.ones_like(scale) / scale)).clamp_(-448, 448).to(E4M3), scale)


def _assert_same(found: Codes, expected: Codes) -> None:
    assert found.codes.shape == expected.codes.shape and torch.equal(found.scale, expected.scale)
    assert torch.equal(found.codes.contiguous().view(torch.uint8), expected.codes.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("m", "n", "k", "dtype"), CASES)
def test_codes_of_rows_and_columns_are_those_of_plain_torch(device, dtype, m, n, k) -> None:
    x = random(m, n, seed=1, device=device).to(dtype)
    x[0] = 0.0
    factor = random(n, seed=2, device=device).abs() * 0.01
    for by, rows in ((None, True), (factor, True), (None, False)):
        found_rows, found_columns = quantize(x, by, rows=rows)
        assert (found_rows is None) == (not rows)
        if rows:
            _assert_same(found_rows, _rows_twin(x if by is None else x.float() * by))
        _assert_same(found_columns, _rows_twin(x.t()))


@pytest.mark.parametrize(("m", "n", "k", "dtype"), CASES)
def test_products_are_those_of_the_codes_and_err_by_their_rounding(device, monkeypatch, dtype, m, n, k) -> None:
    dy, x, weight = _case(m, n, k, device, dtype)
    by_token, by_output, by_input, by_feature = (
        twin.codes.double() * twin.scale.double() for twin in map(_rows_twin, (dy, dy.t(), weight.t(), x.t()))
    )
    dx = input_grad(dy, weight)
    assert dx.dtype == dtype and dx.shape == (m, k)
    # a rounding to 16 bits, fp16's near 1e-4 with fewer of them, and on Hopper sums of 14 bits
    assert relative_error(dx, by_token @ by_input.t()) < (5e-3 if dtype == torch.bfloat16 else 2e-2)
    assert relative_error(dx, dy.double() @ weight.double()) < BOTH * (1.0 if dtype == torch.bfloat16 else 1.1)
    into = torch.zeros(n, k, device=device)
    add_weight_grad(dy, x, into)
    assert relative_error(into, by_output @ by_feature.t()) < (1e-5 if INTERPRETED else 3e-3)
    # of m products one is no average: the largest errors of a single product are twice the mean
    assert relative_error(into, dy.double().t() @ x.double()) < BOTH * (2.0 if m == 1 else 1.0)
    before = random(n, k, seed=4, device=device) * 1e-3
    total = before.clone()
    add_weight_grad(dy, x, total)
    torch.testing.assert_close(total - before, into, rtol=1e-4, atol=1e-9)
    if INTERPRETED:  # Hopper has no use for pointers, and other GPUs take nothing else
        monkeypatch.setattr(fp8_backward, "supports_tma", lambda tensor: False)
        by_pointers = torch.zeros(n, k, device=device)
        add_weight_grad(dy, x, by_pointers)
        assert torch.equal(by_pointers, into)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_weight_of_codes_is_not_rounded_again(device, m, n, k) -> None:
    dy, _, weight = _case(m, n, k, device)
    stored = _rows_twin(weight)
    prepared = transpose(stored.codes, stored.scale.bfloat16())
    assert torch.equal(prepared.codes.codes.float(), stored.codes.float().t()) and (prepared.codes.scale == 1).all()
    exact = dy.double() @ (stored.codes.double() * stored.scale.bfloat16().double())
    dx = input_grad(dy, stored.codes, stored.scale.bfloat16())
    assert relative_error(dx, exact) < ONE_OPERAND * (1.5 if m == 1 else 1.0)


def test_a_row_of_dx_is_its_own(device) -> None:
    dy, _, weight = _case(133, 72, 40, device)
    whole = input_grad(dy, weight)
    for start, end in ((0, 64), (60, 124)):
        found = input_grad(dy[start:end], weight)
        torch.testing.assert_close(found, whole[start:end], rtol=2**-7, atol=1e-7)
        assert INTERPRETED or torch.equal(found, whole[start:end])  # numpy's sums depend on the tile


def test_rows_may_be_strided_spread_or_transposed(device) -> None:
    dy, x, weight = _case(37, 64, 48, device)
    wide = torch.full((37, 100), torch.nan, device=device, dtype=torch.bfloat16)
    wide[:, 3:67] = dy
    for given in (wide[:, 3:67], dy.t().contiguous().t()):
        assert torch.equal(input_grad(given, weight), input_grad(dy, weight))
        into, expected = torch.zeros(2, 64, 48, device=device)
        add_weight_grad(given, x, into)
        add_weight_grad(dy, x, expected)
        assert torch.equal(into, expected)
    spread = torch.ones((), dtype=torch.bfloat16, device=device).expand(37, 64)
    assert torch.equal(input_grad(spread, weight), input_grad(spread.contiguous(), weight))


def test_no_tokens_and_zero_gradients_change_nothing_and_tiny_ones_stay_finite(device) -> None:
    before = random(40, 24, seed=4, device=device)
    for m, scale in ((0, 1.0), (37, 0.0), (37, 1e-36)):
        dy, x, weight = _case(m, 40, 24, device)
        into = before.clone()
        dx = both(dy * scale, x, weight, into)
        assert dx.shape == (m, 24) and dx.isfinite().all() and into.isfinite().all()
        assert scale == 1e-36 or (not dx.any() and torch.equal(into, before))


def test_what_is_not_finite_spoils_its_row_and_column(device) -> None:
    dy, x, weight = _case(37, 64, 48, device)
    dy[4, 9] = torch.nan
    into = torch.zeros(64, 48, device=device)
    dx = both(dy, x, weight, into)
    finite, features = torch.arange(37, device=device) != 4, torch.arange(64, device=device) != 9
    assert dx[finite].isfinite().all() and not dx[4].isfinite().any()
    assert into[features].isfinite().all() and not into[9].isfinite().any()
