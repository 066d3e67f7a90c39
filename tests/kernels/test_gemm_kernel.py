"""`gemm`: 16-bit, INT8 and FP8 products of the Triton kernel against float64 and the plain-torch reference."""

import pytest
import torch
from pairwise import pairwise
from products import integers, random, relative_error
from qarl_kernels import gemm, reference
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from qarl_kernels.tuning import Tile
from running import NEEDS_TRITON
from torch import Tensor

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

# (M, N, K): whole tiles, ragged everywhere, one row, K too ragged for the tensor memory accelerator, K under a block
SHAPES = [(64, 64, 128), (37, 136, 160), (1, 72, 576), (5, 30, 100), (3, 17, 24)]
TILES = [
    Tile("x_first", 64, 64, 64),
    Tile("w_first", 16, 64, 128),
    Tile("x_first", 64, 128, 64, warps=8, persistent=True, halves=True),
]
ONE_ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}  # of the result; fp32: the sum


def _run(x: Tensor, w: Tensor, tile: Tile, dtype: torch.dtype, scales=(None, None), bias=None) -> Tensor:
    out = torch.full((x.shape[0], w.shape[0]), torch.nan, dtype=dtype, device=x.device)
    gemm.run(x, w, *scales, bias, out, tile)
    return out


@pytest.mark.parametrize(("shape", "tile", "dtype"), pairwise(SHAPES, TILES, [torch.bfloat16, torch.float16]))
def test_dense_is_the_float64_product_rounded_once(device, shape, tile, dtype) -> None:
    m, n, k = shape
    x, w = random(m, k, seed=1, device=device, dtype=dtype), random(n, k, seed=2, device=device, dtype=dtype)
    bias = random(n, seed=3, device=device, dtype=dtype)
    expected = x.double() @ w.double().t() + bias.double()
    for out in (dtype, torch.float32):
        assert relative_error(_run(x, w, tile, out, bias=bias), expected) < ONE_ROUNDING[out]


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.way + "_persistent" * tile.persistent)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_w8a8_is_the_reference_bit_for_bit(device, m, n, k, tile) -> None:
    x = random(m, k, seed=1, device=device, dtype=torch.bfloat16)
    codes = integers(-128, 127, n, k, seed=2, device=device)
    scale = (torch.rand(n, 1, generator=torch.Generator().manual_seed(3)) * 0.01).bfloat16().to(device)
    bias = random(n, seed=4, device=device, dtype=torch.bfloat16)
    result = _run(
        *(quantize_activation_int8(x)[0], codes), tile, torch.bfloat16, (quantize_activation_int8(x)[1], scale), bias
    )
    assert torch.equal(result, reference.w8a8(x, codes.float(), scale, bias))


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.way + "_persistent" * tile.persistent)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_fp8_is_the_float64_product_of_the_codes(device, m, n, k, tile) -> None:
    if device.type == "cuda" and k % 16:
        pytest.skip("FP8 rows of this K have no 16-byte stride; the interpreter covers the pointer path")
    x = random(m, k, seed=1, device=device, dtype=torch.bfloat16)
    codes = random(n, k, seed=2, device=device).to(torch.float8_e4m3fn)
    scale = torch.rand(n, 1, generator=torch.Generator().manual_seed(3)).to(device) * 0.01
    qx, scale_x = quantize_activation_fp8(x)
    expected = (qx.double() @ codes.double().t()) * scale.double().t() * scale_x.double()
    # fast accumulation keeps 14 bits of a sum of products (Hopper); one rounding to bf16 elsewhere
    assert relative_error(_run(qx, codes, tile, torch.bfloat16, (scale_x, scale)), expected) < 5e-3


def test_errors_name_what_is_wrong(device) -> None:
    x = torch.zeros(2, 64, device=device, dtype=torch.bfloat16)
    scale = torch.ones(2, 1, device=device)
    with pytest.raises(ValueError, match="64 features and the weight 32"):
        gemm.dense(x, torch.zeros(8, 32, device=device, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"not torch.bfloat16 and torch.float16"):
        gemm.dense(x, torch.zeros(8, 64, device=device, dtype=torch.float16))
    with pytest.raises(ValueError, match="quantize the activations first"):
        gemm.scaled(x, scale, torch.zeros(8, 64, device=device, dtype=torch.int8), scale, None, torch.bfloat16)
    with pytest.raises(ValueError, match="quantize the activations first"):
        gemm.scaled(x, scale, x.to(torch.float8_e4m3fn), scale, None, torch.bfloat16)
