"""Products of experts by Triton: each row against the dense product with its expert's weight, and float64."""

from collections.abc import Callable
from dataclasses import dataclass

import mixtures
import pytest
import torch
from nvfp4_products import Nvfp4
from products import Int4, integers, random, relative_error
from qarl_kernels import fp8_block, gemm, nvfp4a16, w4a8, w4a16
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from qarl_kernels.moe.groups import Groups
from qarl_kernels.tuning import Tile
from running import NEEDS_TRITON
from torch import Tensor

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

EXPERTS, TOKENS = 3, 9
BF16 = torch.bfloat16
ONE_ROUNDING = {BF16: 2**-8, torch.float16: 2**-11}
FAST = 5e-3  # FP8 on Hopper accumulates 14 bits of a sum


@dataclass
class Weights:
    """Weights of all experts: `product(x, expert, **grouped)` with one expert's, None: with all; `exact` in float64."""

    product: Callable[..., Tensor]
    exact: Callable[[Tensor, int], Tensor]
    tolerance: float


def dense(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Weights:
    weight = random(EXPERTS * n, k, seed=2, device=device, dtype=dtype)
    own = weight.chunk(EXPERTS)
    return Weights(
        lambda x, e, **given: gemm.dense(x, weight if e is None else own[e], **given),
        lambda x, e: x.double() @ own[e].double().t(),
        ONE_ROUNDING[dtype],
    )


def scaled(n: int, k: int, dtype: torch.dtype, device: torch.device, int8: bool) -> Weights:
    quantize = quantize_activation_int8 if int8 else quantize_activation_fp8
    codes = integers(-128, 127, EXPERTS * n, k, seed=2, device=device)
    codes = codes if int8 else random(EXPERTS * n, k, seed=2, device=device).to(torch.float8_e4m3fn)
    scale = (torch.rand(EXPERTS * n, 1, generator=torch.Generator().manual_seed(3)) * 0.01).to(device, BF16)
    own = list(zip(codes.chunk(EXPERTS), scale.chunk(EXPERTS), strict=True))

    def exact(x: Tensor, e: int) -> Tensor:
        qx, s_x = quantize(x)
        return qx.double() @ own[e][0].double().t() * own[e][1].double().t() * s_x.double()

    return Weights(
        lambda x, e, **given: gemm.scaled(
            *quantize(x), *((codes, scale) if e is None else own[e]), None, dtype, **given
        ),
        exact,
        ONE_ROUNDING[dtype] if int8 else FAST,
    )


def blocks(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Weights:
    codes = random(EXPERTS * n, k, seed=2, device=device).to(torch.float8_e4m3fn)
    scale = random(EXPERTS * n // 128, -(-k // 128), seed=4, device=device).to(BF16)
    own = list(zip(codes.chunk(EXPERTS), scale.chunk(EXPERTS), strict=True))

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        parts = [quantize_activation_fp8(part) for part in x.split(128, 1)]
        return torch.cat([codes for codes, _ in parts], 1), torch.cat([scale for _, scale in parts], 1)

    def exact(x: Tensor, e: int) -> Tensor:
        (qx, s_x), (mine, s_w) = quantize(x), own[e]
        wide = s_w.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :k]
        return (qx.double() * s_x.double().repeat_interleave(128, 1)[:, :k]) @ (mine.double() * wide).t()

    return Weights(
        lambda x, e, **given: fp8_block.fp8_block(
            *quantize(x), *((codes, scale) if e is None else own[e]), None, dtype, **given
        ),
        exact,
        FAST,
    )


def _one(weight: Int4, expert: int | None) -> Int4:
    """An expert's own weight, without zero points; None: that of all."""
    if expert is None:
        return weight
    return Int4(weight.codes.chunk(EXPERTS)[expert], weight.scale.chunk(EXPERTS)[expert], None, weight.group)


def int4(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Weights:
    weight = Int4.random(EXPERTS * n, k, 32, dtype=dtype, device=device)

    def product(x: Tensor, e: int | None, **given) -> Tensor:
        own = _one(weight, e)
        return w4a16.w4a16(x, None, own.scale, None, own.tiled(), own.meta(dtype), **given)

    return Weights(product, lambda x, e: x.double() @ _one(weight, e).values(dtype).double().t(), ONE_ROUNDING[dtype])


def int4_int8(n: int, k: int, dtype: torch.dtype, device: torch.device, group: int | None = 64) -> Weights:
    weight = Int4.random(EXPERTS * n, k, group, device=device)

    def product(x: Tensor, e: int | None, **given) -> Tensor:
        own = _one(weight, e)
        form = own.tiled(), own.meta_int8(), k, n
        return w4a8.w4a8(*quantize_activation_int8(x), *form, None, dtype, group is None, **given)

    def exact(x: Tensor, e: int) -> Tensor:
        qx, s_x = quantize_activation_int8(x)
        return qx.double() @ _one(weight, e).values(torch.float32).double().t() * s_x.double()

    return Weights(product, exact, ONE_ROUNDING[dtype])


def nvfp4(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Weights:
    weight = Nvfp4.random(EXPERTS * n, k, device=device)

    def product(x: Tensor, e: int | None, **given) -> Tensor:
        stored = weight.packed, weight.scale
        own = stored if e is None else tuple(part.chunk(EXPERTS)[e] for part in stored)
        return nvfp4a16.nvfp4a16(x, *own, weight.global_scale, *nvfp4a16.tile_nvfp4(*own), **given)

    def exact(x: Tensor, e: int) -> Tensor:
        return x.double() @ weight.scaled_codes().chunk(EXPERTS)[e].double().t() / weight.global_scale.double()

    return Weights(product, exact, ONE_ROUNDING[dtype])


MAKE: dict[str, Callable[..., Weights]] = {
    "dense": dense,
    "w8a8": lambda *shape: scaled(*shape, int8=True),
    "fp8": lambda *shape: scaled(*shape, int8=False),
    "fp8_block": blocks,
    "w4a16": int4,
    "w4a8": int4_int8,
    "w4a8 channel": lambda *shape: int4_int8(*shape, group=None),
    "nvfp4a16": nvfp4,
}
WGMMA = [Tile("w_first", 16, 64, 64), Tile("x_first", 64, 128, 64, warps=8), Tile("w_first", 64, 64, 64)]
FOUR_BITS = [Tile("narrow", 16, 32, warps=2), Tile("wide", 16, 64), Tile("wide", 16, 64, tma=True, split=True)]
# N of an expert that no tile divides; K of whole blocks, of none, and rows that no vector can be loaded from
CASES = [
    *(("dense", tile, *shape) for tile in WGMMA for shape in ((64, 128), (72, 144), (30, 100))),
    *((name, tile, *shape) for name in ("w8a8", "fp8") for tile in WGMMA[:2] for shape in ((72, 160), (30, 100))),
    *(("fp8_block", tile, 128, k) for tile in (Tile("w_first", 16, 64), WGMMA[1]) for k in (160, 100)),
    *((name, tile, 24, 160) for name in ("w4a16", "nvfp4a16") for tile in (*FOUR_BITS, Tile("dequantized"))),
    *((name, Tile("wide", 16, 64), 24, k) for name, k in (("w4a8", 256), ("w4a8 channel", 100))),
]


def rows(groups: Groups, gathered: bool, k: int, dtype: torch.dtype) -> Tensor:
    """x, its rows further apart than they are long."""
    count = groups.rows // groups.slots if gathered else groups.rows
    return random(count, k + 16, seed=1, device=groups.order.device, dtype=dtype)[:, :k]


# Every case with gathered rows; of each family and shape also one tile with sorted ones.
SORTED = {(family, n, k): (family, tile, n, k) for family, tile, n, k in CASES if tile.way != "dequantized"}
MET = [*((*case, True, BF16) for case in CASES), *((*case, False, torch.float16) for case in SORTED.values())]


@pytest.mark.parametrize(
    ("family", "tile", "n", "k", "gathered", "dtype"), MET, ids=lambda value: getattr(value, "way", str(value))
)
def test_a_row_has_the_bits_of_its_experts_own_product(device, family, tile, n, k, gathered, dtype) -> None:
    if device.type == "cuda" and k % 16 and family.startswith("fp8"):
        pytest.skip("FP8 rows of this K have no 16-byte stride; the interpreter covers the pointer path")
    weights, groups = MAKE[family](n, k, dtype, device), mixtures.grouped(TOKENS, 2, EXPERTS, device)
    x = rows(groups, gathered, k, dtype)
    y = weights.product(x, None, groups=groups, gathered=gathered, tile=tile)
    alone = mixtures.by_expert(groups, gathered, x, lambda own, e: weights.product(own, e, tile=tile))
    assert torch.equal(y, alone)
    assert relative_error(y, mixtures.by_expert(groups, gathered, x, weights.exact)) < weights.tolerance


@pytest.mark.parametrize("tile", FOUR_BITS, ids=lambda tile: f"{tile.way}{'_tma' * tile.tma}")
def test_ways_of_w4a16_agree_where_sums_are_exact(device, tile: Tile) -> None:
    """Small integers for x and powers of two for scales: float32 holds every partial sum, whatever the order."""
    groups = mixtures.grouped(TOKENS, 2, EXPERTS, device)
    weight = Int4.random(EXPERTS * 24, 160, 32, asymmetric=True, device=device)
    weight.scale = torch.full_like(weight.scale, 0.25)
    x = torch.randint(-4, 5, (TOKENS, 160), generator=torch.Generator().manual_seed(3)).to(device, BF16)
    stored, tiled = (weight.scale, weight.packed_zero_point()), (weight.tiled(), weight.meta(BF16))
    given = {"groups": groups, "gathered": True}
    y = w4a16.w4a16(x, None, *stored, *tiled, **given, tile=tile)
    assert torch.equal(y, w4a16.w4a16(x, weight.packed(), *stored, None, None, **given))
    assert torch.equal(y, w4a16.w4a16(x, None, *stored, *tiled, **given, tile=Tile("dequantized")))


def test_tiles_of_the_defaults_agree_with_the_dense_ones(device) -> None:
    """What is chosen for few rows and for many, against what is chosen for one dense row."""
    weight = random(3 * 64, 128, seed=2, device=device, dtype=BF16)
    for tokens in (5, 70, 260):
        groups = mixtures.grouped(tokens, 1, 3, device)
        x = random(tokens, 128, seed=1, device=device, dtype=BF16)
        result = gemm.dense(x, weight, groups=groups, gathered=True)
        for expert, own, its in mixtures.parts(groups):
            for row, token in list(zip(range(own.start, own.stop), its, strict=True))[:2]:
                alone = gemm.dense(x[token][None], weight[expert * 64 : (expert + 1) * 64])
                assert torch.equal(result[row], alone[0])


@pytest.mark.parametrize("tile", [WGMMA[0], WGMMA[2]], ids=lambda tile: f"{tile.block_m}")
def test_what_is_not_finite_stays_in_its_row_and_its_expert(device, tile) -> None:
    groups, weight = mixtures.grouped(30, 2, 5, device), random(5 * 40, 72, seed=2, device=device, dtype=BF16)
    x = rows(groups, True, 72, BF16)
    clean = gemm.dense(x, weight, groups=groups, gathered=True, tile=tile)
    x[4, 3] = torch.nan
    weight[2 * 40 : 3 * 40] = torch.nan
    result = gemm.dense(x, weight, groups=groups, gathered=True, tile=tile)
    spoiled = (groups.order // 2 == 4).clone()
    spoiled[groups.starts[2] : groups.starts[3]] = True
    assert 0 < spoiled.sum() < groups.rows
    assert result[spoiled].isnan().all() and torch.equal(result[~spoiled], clean[~spoiled])


@pytest.mark.parametrize("family", MAKE)
def test_no_tokens_give_no_rows_and_what_does_not_fit_is_refused(device, family: str) -> None:
    groups, weights = mixtures.grouped(4, 2, EXPERTS, device), MAKE[family](128, 256, BF16, device)
    x, none = torch.ones(4, 256, device=device, dtype=BF16), mixtures.grouped(0, 2, EXPERTS, device)
    for gathered in (False, True):
        assert weights.product(x[:0], None, groups=none, gathered=gathered).shape == (0, 128)
    with pytest.raises(ValueError, match="x has 4 rows, but these groups need 8, one per sorted pair"):
        weights.product(x, None, groups=groups)
    with pytest.raises(ValueError, match=r"but a tiled weight|they must agree|do not fit each other|of 256 features"):
        weights.product(x[:, :96], None, groups=groups, gathered=True)
    if not family.startswith("w4a8"):  # which is told an expert's number of features
        with pytest.raises(ValueError, match="a weight of 384 rows is not that of 5 experts"):
            weights.product(x, None, groups=mixtures.grouped(4, 2, 5, device), gathered=True)


def test_a_bias_other_dtypes_and_shared_scales_are_refused(device) -> None:
    groups, x = mixtures.grouped(4, 2, EXPERTS, device), torch.ones(4, 96, device=device, dtype=BF16)
    weight, given = torch.ones(EXPERTS * 40, 96, device=device, dtype=BF16), {"groups": groups, "gathered": True}
    with pytest.raises(ValueError, match="grouped products take no bias"):
        gemm.dense(x, weight, x[0], **given)
    with pytest.raises(ValueError, match="dense needs bf16 or fp16 operands of one dtype"):
        gemm.dense(x, weight.half(), **given)
    for product in (gemm.scaled, fp8_block.fp8_block):
        with pytest.raises(ValueError, match=r"needs .* codes, not torch\.bfloat16"):
            product(x, x[:, :1], weight, weight[:, :1], None, BF16, **given)
    qx, codes = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="experts of 40 output features would share scales, which span 128"):
        fp8_block.fp8_block(qx, torch.ones(4, 1), codes, torch.ones(2, 1), None, BF16, **given)
