"""Products in Triton, every family by every kind of tile: against float64, and rows of experts bit for bit."""

import mixtures
import pytest
import torch
from kernel_harness import NEEDS_TRITON
from pairwise import pairwise
from products import BF16, MAKE, Int4, int4, int4_int8, random, relative_error
from qarl_kernels import reference, w4a8
from qarl_kernels.activation import quantize_activation_int8
from qarl_kernels.tuning import Tile

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

EXPERTS, TOKENS = 3, 9
ONE_ROUNDING = {BF16: 2**-8, torch.float16: 2**-11}
GEMM = [
    Tile("x_first", 64, 64, 64),
    Tile("w_first", 16, 64, 128),
    Tile("x_first", 64, 128, 64, warps=8, persistent=True, halves=True),
]
BLOCKS = [Tile("x_first", 64, 64), Tile("w_first", 16, 64), Tile("w_first", 16, 128)]
FOUR_BITS = [
    Tile("narrow", 16, 32, warps=2),
    Tile("wide", 16, 64),
    Tile("wide", 64, 128, warps=8, tma=True),
    Tile("wide", 16, 64, tma=True, split=True),
    Tile("dequantized"),
]
INT8 = [Tile("wide", 16, 32, warps=2), Tile("wide", 64, 64), Tile("wide", 16, 128, warps=8)]
# (M, N, K): whole tiles, ragged everywhere, one row and K too ragged for the tensor memory accelerator
SHAPES = [(64, 64, 128), (37, 136, 160), (1, 30, 100)]
OF_BLOCKS = [(64, 128, 256), (5, 200, 304), (3, 129, 64)]
OF_FP4 = [(18, 70, 160), (3, 41, 16), (1, 37, 336)]  # a word of scales with two of them
# And the group: K of one and a half tiles, K of several that only its channel divides
OF_INT4 = [(16, 64, 256, 128), (1, 37, 192, 64), (18, 70, 160, 32), (3, 40, 300, None)]
DENSE = [
    *((name, *case) for name in ("dense", "w8a8", "fp8") for case in pairwise(SHAPES, GEMM, ONE_ROUNDING)),
    *(("fp8_block", *case) for case in pairwise(OF_BLOCKS, BLOCKS, ONE_ROUNDING)),
    *(("nvfp4a16", *case) for case in pairwise(OF_FP4, FOUR_BITS, ONE_ROUNDING)),
    *(("w4a8", *case) for case in pairwise(OF_INT4, INT8, ONE_ROUNDING)),
    *(("w4a16", *case) for case in pairwise(OF_INT4, FOUR_BITS, ONE_ROUNDING, [False, True])),
]
INT4_FAMILIES = {"w4a16": int4, "w4a8": int4_int8}


def skip_odd_fp8(device: torch.device, family: str, k: int) -> None:
    if device.type == "cuda" and k % 16 and family.startswith("fp8"):
        pytest.skip("FP8 rows of this K have no 16-byte stride; the interpreter covers the pointer path")


@pytest.mark.parametrize("case", DENSE, ids=lambda case: f"{case[0]}-{case[1]}-{case[2].way}")
def test_a_product_is_that_of_float64(device, case) -> None:
    family, (m, n, k, *group), tile, dtype, *asymmetric = case
    skip_odd_fp8(device, family, k)
    weights = INT4_FAMILIES.get(family, MAKE[family])(n, k, dtype, device, 1, *group, *asymmetric)
    x, bias = random(m, k, seed=5, device=device, dtype=dtype), random(n, seed=6, device=device, dtype=dtype)
    expected = weights.exact(x, 0) + bias.double()
    assert relative_error(weights.product(x, 0, bias, torch.float32, tile=tile), expected) < weights.error
    y = weights.product(x, 0, bias, dtype, tile=tile)
    assert y.dtype == dtype and relative_error(y, expected) < max(weights.error, ONE_ROUNDING[dtype])
    if weights.bits is not None:
        assert torch.equal(y, weights.bits(x, bias))


# N of an expert that no tile divides; K of whole blocks, of none, and rows that no vector can be loaded from
FEW, SMALL = Tile("w_first", 16, 64, 64), Tile("x_first", 64, 128, 64, warps=8)
CASES = [
    *(("dense", tile, *shape) for tile, shape in ((FEW, (72, 144)), (SMALL, (30, 100)), (GEMM[0], (64, 128)))),
    *((name, tile, *shape) for name in ("w8a8", "fp8") for tile, shape in ((FEW, (72, 160)), (SMALL, (30, 100)))),
    *(("fp8_block", tile, 128, k) for tile, k in ((BLOCKS[1], 160), (SMALL, 100))),
    *((name, tile, 24, 160) for name in ("w4a16", "nvfp4a16") for tile in FOUR_BITS if tile.block_m != 64),
    *((name, Tile("wide", 16, 64), 24, k) for name, k in (("w4a8", 256), ("w4a8 channel", 100))),
]
# Every case with gathered rows; of each family and shape also one tile with sorted ones.
SORTED = {(family, n, k): (family, tile, n, k) for family, tile, n, k in CASES if tile.way != "dequantized"}
MET = [*((*case, True, BF16) for case in CASES), *((*case, False, torch.float16) for case in SORTED.values())]


@pytest.mark.parametrize(
    ("family", "tile", "n", "k", "gathered", "dtype"), MET, ids=lambda value: getattr(value, "way", str(value))
)
def test_a_row_has_the_bits_of_its_experts_own_product(device, family, tile, n, k, gathered, dtype) -> None:
    skip_odd_fp8(device, family, k)
    weights, groups = MAKE[family](n, k, dtype, device, EXPERTS), mixtures.grouped(TOKENS, 2, EXPERTS, device)
    # Rows lie further apart than they are long.
    x = random(TOKENS if gathered else groups.rows, k + 16, seed=1, device=device, dtype=dtype)[:, :k]
    y = weights.product(x, None, groups=groups, gathered=gathered, tile=tile)
    alone = mixtures.by_expert(groups, gathered, x, lambda own, e: weights.product(own, e, tile=tile))
    assert torch.equal(y, alone)
    expected = mixtures.by_expert(groups, gathered, x, weights.exact)
    assert relative_error(y, expected) < max(weights.error, ONE_ROUNDING[dtype])


def test_w4a8_channel_sums_stay_exact_beyond_the_float32_integers(device) -> None:
    """All codes -8 against all activations 127, K = 17,000: 17.3 million, more than 2^24, in one group."""
    n, k = 16, 17_000
    weight, x = Int4.random(n, k, None, device=device), torch.ones(2, k, device=device, dtype=BF16)
    weight.codes.fill_(-8)
    qx, scale_x = quantize_activation_int8(x)
    form = weight.tiled(), weight.meta_int8(), k, n
    result = w4a8.w4a8(qx, scale_x, *form, None, torch.float32, True, tile=INT8[0])
    assert torch.equal(result, reference.w4a8(x.float(), weight.codes.float(), weight.scale))


@pytest.mark.parametrize("family", ["dense", "fp8_block", "w4a16", "nvfp4a16"])
def test_rows_that_do_not_fit_a_weight_or_its_groups_are_refused(device, family: str) -> None:
    groups, weights = mixtures.grouped(4, 2, EXPERTS, device), MAKE[family](128, 256, BF16, device, EXPERTS)
    x, none = torch.ones(4, 256, device=device, dtype=BF16), mixtures.grouped(0, 2, EXPERTS, device)
    assert weights.product(x[:0], None, groups=none, gathered=True).shape == (0, 128)
    with pytest.raises(ValueError, match="x has 4 rows, but these groups need 8, one per sorted pair"):
        weights.product(x, None, groups=groups)
    for expert, given in ((0, {}), (None, {"groups": groups, "gathered": True})):
        with pytest.raises(ValueError, match=r"but a tiled weight|they must agree|do not fit each other"):
            weights.product(x[:, :96], expert, **given)
    with pytest.raises(ValueError, match="a weight of 384 rows is not that of 5 experts"):
        weights.product(x, None, groups=mixtures.grouped(4, 2, 5, device), gathered=True)
