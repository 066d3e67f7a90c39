"""`w4a16`: the fused kernels against float64, and the three ways against each other."""

import pytest
import torch
from pairwise import pairwise
from products import Int4, random, relative_error
from qarl_kernels import w4a16
from qarl_kernels.tuning import Tile
from running import NEEDS_TRITON

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

TILES = [
    Tile("narrow", 16, 32, warps=2),
    Tile("wide", 16, 64),
    Tile("wide", 64, 128, warps=8, tma=True),
    Tile("wide", 16, 64, tma=True, split=True),
]
# (M, N, K, group): whole, ragged N, K of one and a half tiles, K that only its channel divides
CASES = [(16, 64, 256, 128), (1, 37, 192, 64), (18, 70, 160, 32), (3, 40, 100, None)]
ONE_ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def name(tile: Tile) -> str:
    return f"{tile.way}_{tile.block_n}{'_tma' * tile.tma}{'_split' * tile.split}"


def _fused(weight: Int4, x, tile, bias=None, out=torch.float32):
    form = weight.tiled(), weight.meta(x.dtype)
    return w4a16.w4a16(x, None, weight.scale, None, *form, bias, out, tile=tile)


@pytest.mark.parametrize(
    ("case", "tile", "dtype", "asymmetric"),
    pairwise(CASES, TILES, ONE_ROUNDING, [True, False]),
    ids=lambda it: name(it) if isinstance(it, Tile) else str(it),
)
def test_fused_product_is_the_float64_product(device, case, tile, dtype, asymmetric) -> None:
    m, n, k, group = case
    weight = Int4.random(n, k, group, asymmetric=asymmetric, dtype=dtype, device=device)
    x = random(m, k, seed=5, device=device, dtype=dtype)
    bias = random(n, seed=6, device=device, dtype=dtype)
    expected = x.double() @ weight.values(dtype).double().t() + bias.double()
    assert relative_error(_fused(weight, x, tile, bias), expected) < 2**-20  # FP32 sums
    assert relative_error(_fused(weight, x, tile, bias, dtype), expected) < ONE_ROUNDING[dtype]


@pytest.mark.parametrize(("group", "asymmetric"), [(128, False), (64, True), (32, False), (None, True)])
def test_weights_in_the_fused_kernel_are_the_reference_values(device, group, asymmetric) -> None:
    """One-hot rows of x read single weights out of the product."""
    weight = Int4.random(48, 256, group, asymmetric=asymmetric, device=device)
    x = torch.eye(256, device=device, dtype=torch.bfloat16)[torch.arange(5, 256, 9)]
    for tile in TILES:
        expected = weight.values(torch.bfloat16)[:, 5::9].t()
        assert torch.equal(_fused(weight, x, tile, out=torch.bfloat16), expected)


@pytest.mark.parametrize("tile", [Tile("narrow", 16, 32, warps=2), Tile("wide", 16, 64)], ids=["narrow", "wide"])
def test_without_a_tiled_form_the_product_goes_over_the_dequantized_weight(device, tile) -> None:
    weight = Int4.random(64, 256, 64, asymmetric=True, device=device)
    x = random(7, 256, seed=5, device=device, dtype=torch.bfloat16)
    y = w4a16.w4a16(x, weight.packed(), weight.scale, weight.packed_zero_point(), None, None)
    expected = x.double() @ weight.values(torch.bfloat16).double().t()
    assert relative_error(y, expected) < ONE_ROUNDING[torch.bfloat16]
    assert relative_error(_fused(weight, x, tile, out=torch.bfloat16), y) < ONE_ROUNDING[torch.bfloat16]


def test_a_weight_of_another_width_is_refused(device) -> None:
    weight = Int4.random(40, 128, 32, device=device)
    x = random(3, 64, seed=5, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x has 64 features and the weight 128"):
        w4a16.w4a16(x, weight.packed(), weight.scale, None, None, None)


@pytest.mark.parametrize("tile", TILES[1:], ids=name)
def test_how_x_comes_and_whether_a_block_is_split_changes_no_bit_where_sums_are_exact(device, tile) -> None:
    """Small integers for x and powers of two for scales: float32 holds every partial sum, whatever the order."""
    weight = Int4.random(37, 192, 64, asymmetric=True, device=device)
    weight.scale = torch.full_like(weight.scale, 0.25)
    x = torch.randint(-4, 5, (17, 192), generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    assert torch.equal(_fused(weight, x, tile, out=torch.bfloat16), _fused(weight, x, TILES[0], out=torch.bfloat16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter sums a tile's features in another order")
@pytest.mark.parametrize("tile", TILES[1:], ids=name)
def test_how_x_comes_and_whether_a_block_is_split_changes_no_bit(device, tile) -> None:
    """Many times over, because a product that reads a register too late goes wrong only now and then."""
    weight = Int4.random(640, 2048, 128, asymmetric=True, device=device)
    x = random(300, 2048, seed=5, device=device, dtype=torch.bfloat16)
    expected = _fused(weight, x, TILES[0], out=torch.bfloat16)
    for _ in range(20):
        assert torch.equal(_fused(weight, x, tile, out=torch.bfloat16), expected)


def test_rows_that_the_accelerator_cannot_read_come_by_pointers(device) -> None:
    weight = Int4.random(40, 128, 32, device=device)
    x = random(9, 131, seed=5, device=device, dtype=torch.bfloat16)[:, 1:129]
    for tile in TILES[2:]:
        assert torch.equal(_fused(weight, x, tile), _fused(weight, x.contiguous(), tile))
