"""Products in Triton, every family by every kind of tile: against float64, and rows of experts bit for bit."""

from dataclasses import replace

import mixtures
import pytest
import torch
from kernel_harness import NEEDS_TRITON
from pairwise import pairwise
from products import BF16, E4M3, MAKE, Int4, dense, int4, int4_int8, random, relative_error
from qarl_kernels import fp8_block, gemm, reference, w4a8, w4a16
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
# (M, N, K): whole tiles, ragged everywhere, one row, K too ragged for the tensor memory accelerator, K under a block
SHAPES = [(64, 64, 128), (37, 136, 160), (1, 72, 576), (5, 30, 100), (3, 17, 24)]
OF_BLOCKS = [(64, 128, 256), (5, 200, 304), (1, 72, 576), (3, 129, 64)]
OF_FP4 = [(16, 64, 256), (18, 70, 160), (3, 41, 16), (1, 37, 336)]  # a word of scales with two of them
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
    *(("dense", tile, *shape) for tile in (FEW, SMALL, GEMM[0]) for shape in ((64, 128), (72, 144), (30, 100))),
    *((name, tile, *shape) for name in ("w8a8", "fp8") for tile in (FEW, SMALL) for shape in ((72, 160), (30, 100))),
    *(("fp8_block", tile, 128, k) for tile in (BLOCKS[1], SMALL) for k in (160, 100)),
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


@pytest.mark.parametrize("experts", [1, EXPERTS])
def test_ways_of_w4a16_agree_where_sums_are_exact(device, experts: int) -> None:
    """Small integers for x and powers of two for scales: float32 holds every partial sum, whatever the order."""
    groups = mixtures.grouped(TOKENS, min(2, experts), experts, device)
    weight = Int4.random(experts * 40, 160, 32, asymmetric=True, device=device)
    weight.scale = torch.full_like(weight.scale, 0.25)
    x = torch.randint(-4, 5, (TOKENS, 160), generator=torch.Generator().manual_seed(3)).to(device, BF16)
    stored, tiled = (weight.scale, weight.packed_zero_point()), (weight.tiled(), weight.meta(BF16))
    given = {"groups": groups, "gathered": True} if experts > 1 else {}
    expected = w4a16.w4a16(x, weight.packed(), *stored, None, None, **given)
    if experts == 1:
        assert torch.equal(expected, (x.double() @ weight.values(BF16).double().t()).to(BF16))
    for tile in FOUR_BITS:
        assert torch.equal(w4a16.w4a16(x, None, *stored, *tiled, **given, tile=tile), expected), tile


@pytest.mark.parametrize("tile", FOUR_BITS[2:4], ids=["tma", "split"])
def test_rows_that_the_accelerator_cannot_read_come_by_pointers(device, tile: Tile) -> None:
    weights = int4(40, 128, BF16, device, 1)
    x = random(9, 131, seed=5, device=device, dtype=BF16)[:, 1:129]
    assert torch.equal(weights.product(x, 0, tile=tile), weights.product(x.contiguous(), 0, tile=tile))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter sums a tile's features in another order")
@pytest.mark.parametrize("tile", FOUR_BITS[1:4], ids=["pointers", "tma", "split"])
@pytest.mark.parametrize("family", ["w4a16", "nvfp4a16"])
def test_how_x_comes_and_whether_a_block_is_split_changes_no_bit(device, family, tile) -> None:
    """Many times over, because a product that reads a register too late goes wrong only now and then."""
    weights, x = MAKE[family](640, 2048, BF16, device, 1), random(300, 2048, seed=5, device=device, dtype=BF16)
    expected = weights.product(x, 0, tile=FOUR_BITS[0])
    for _ in range(20):
        assert torch.equal(weights.product(x, 0, tile=tile), expected)


def test_w4a8_channel_sums_stay_exact_beyond_the_float32_integers(device) -> None:
    """All codes -8 against all activations 127, K = 17,000: 17.3 million, more than 2^24, in one group."""
    n, k = 16, 17_000
    weight, x = Int4.random(n, k, None, device=device), torch.ones(2, k, device=device, dtype=BF16)
    weight.codes.fill_(-8)
    qx, scale_x = quantize_activation_int8(x)
    form = weight.tiled(), weight.meta_int8(), k, n
    result = w4a8.w4a8(qx, scale_x, *form, None, torch.float32, True, tile=INT8[0])
    assert torch.equal(result, reference.w4a8(x.float(), weight.codes.float(), weight.scale))


def test_tiles_of_the_defaults_agree_with_the_dense_ones(device) -> None:
    """What is chosen for few rows and for many, against what is chosen for one dense row."""
    weights = dense(64, 128, BF16, device, EXPERTS)
    for tokens in (5, 70, 260):
        groups, x = mixtures.grouped(tokens, 1, EXPERTS, device), random(tokens, 128, seed=1, device=device, dtype=BF16)
        result = weights.product(x, None, groups=groups, gathered=True)
        for expert, own, its in mixtures.parts(groups):
            for row, token in list(zip(range(own.start, own.stop), its, strict=True))[:2]:
                assert torch.equal(result[row], weights.product(x[token][None], expert)[0])


@pytest.mark.parametrize("tile", [FEW, replace(FEW, block_m=64)], ids=lambda tile: f"{tile.block_m}")
def test_what_is_not_finite_stays_in_its_row_and_its_expert(device, tile) -> None:
    groups, weight = mixtures.grouped(30, 2, 5, device), random(5 * 40, 72, seed=2, device=device, dtype=BF16)
    x = random(30, 72, seed=1, device=device, dtype=BF16)
    clean = gemm.dense(x, weight, groups=groups, gathered=True, tile=tile)
    x[4, 3] = torch.nan
    weight[2 * 40 : 3 * 40] = torch.nan
    result = gemm.dense(x, weight, groups=groups, gathered=True, tile=tile)
    spoiled = (groups.order // 2 == 4).clone()
    spoiled[groups.starts[2] : groups.starts[3]] = True
    assert 0 < spoiled.sum() < groups.rows
    assert result[spoiled].isnan().all() and torch.equal(result[~spoiled], clean[~spoiled])


@pytest.mark.parametrize("family", MAKE)
def test_rows_that_do_not_fit_a_weight_or_its_groups_are_refused(device, family: str) -> None:
    groups, weights = mixtures.grouped(4, 2, EXPERTS, device), MAKE[family](128, 256, BF16, device, EXPERTS)
    x, none = torch.ones(4, 256, device=device, dtype=BF16), mixtures.grouped(0, 2, EXPERTS, device)
    for gathered in (False, True):
        assert weights.product(x[:0], None, groups=none, gathered=gathered).shape == (0, 128)
    with pytest.raises(ValueError, match="x has 4 rows, but these groups need 8, one per sorted pair"):
        weights.product(x, None, groups=groups)
    wrong = r"but a tiled weight|they must agree|do not fit each other|of 256 features"
    for given in ({}, {"groups": groups, "gathered": True}):
        with pytest.raises(ValueError, match=wrong):
            weights.product(x[:, :96], 0 if not given else None, **given)
    if not family.startswith("w4a8"):  # which is told an expert's number of features
        with pytest.raises(ValueError, match="a weight of 384 rows is not that of 5 experts"):
            weights.product(x, None, groups=mixtures.grouped(4, 2, 5, device), gathered=True)


def test_a_bias_of_experts_other_dtypes_and_shared_scales_are_refused(device) -> None:
    groups, x = mixtures.grouped(4, 2, EXPERTS, device), torch.ones(4, 96, device=device, dtype=BF16)
    weight, given = torch.ones(EXPERTS * 40, 96, device=device, dtype=BF16), {"groups": groups, "gathered": True}
    codes, scale = weight.to(E4M3), weight[:, :1]
    with pytest.raises(ValueError, match="grouped products take no bias"):
        gemm.dense(x, weight, x[0], **given)
    with pytest.raises(ValueError, match="dense needs bf16 or fp16 operands of one dtype"):
        gemm.dense(x, weight.half(), **given)
    for product, wrong in ((gemm.scaled, weight), (gemm.scaled, codes), (fp8_block.fp8_block, weight)):
        with pytest.raises(ValueError, match=r"needs .* codes, not torch\.bfloat16 .*quantize the activations first"):
            product(x, x[:, :1], wrong, scale, None, BF16)
    with pytest.raises(ValueError, match="experts of 40 output features would share scales, which span 128"):
        fp8_block.fp8_block(x.to(E4M3), torch.ones(4, 1), codes, torch.ones(2, 1), None, BF16, **given)
