"""Grouped products of 4-bit weights: the ways against each other, against the dense kernels, and float64."""

from __future__ import annotations

import mixtures
import pytest
import torch
from nvfp4_products import Nvfp4
from products import Int4, random, relative_error
from qarl_kernels import nvfp4a16, reference, w4a16
from qarl_kernels.activation import quantize_activation_int8
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.moe import nvfp4a16 as moe_nvfp4a16
from qarl_kernels.moe import w4a8 as moe_w4a8
from qarl_kernels.moe import w4a16 as moe_w4a16
from qarl_kernels.tuning import Tile
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 or a GPU"),
    pytest.mark.usefixtures("poisoned"),
]

EXPERTS, TOKENS = 3, 6
TILES = [Tile("narrow", 16, 32, warps=2), Tile("wide", 16, 64), Tile("wide", 16, 64, tma=True, split=True)]
ONE_ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def name(tile: Tile) -> str:
    return f"{tile.way}{'_tma' * tile.tma}"


def _groups(device: torch.device):
    return mixtures.grouped(TOKENS, 2, EXPERTS, device)


def _x(k: int, gathered: bool, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return random(TOKENS * (1 if gathered else 2), k, seed=1, device=device, dtype=dtype)


def _expert(weight: Int4, expert: int) -> Int4:
    """Its own weight in a stack, without zero points."""
    return Int4(weight.codes.chunk(EXPERTS)[expert], weight.scale.chunk(EXPERTS)[expert], None, weight.group)


# n of an expert that no tile of 16 rows divides, K that no block of 128 does
@pytest.mark.parametrize(("dtype", "gathered"), [(torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("tile", TILES, ids=name)
def test_w4a16_is_the_product_of_each_expert_alone_bit_for_bit(device, tile: Tile, dtype, gathered: bool) -> None:
    n, k, groups = 24, 160, _groups(device)
    weight = Int4.random(EXPERTS * n, k, 32, dtype=dtype, device=device)
    x = _x(k, gathered, device, dtype)
    y = moe_w4a16.fused(x, weight.tiled(), weight.meta(dtype), n, groups, gathered, tile)

    def alone(rows: Tensor, expert: int) -> Tensor:
        own = _expert(weight, expert)
        return w4a16.fused(rows, own.tiled(), own.meta(dtype), n, None, dtype, tile)

    def exact(rows: Tensor, expert: int) -> Tensor:
        return rows.double() @ _expert(weight, expert).values(dtype).double().t()

    assert torch.equal(y, mixtures.by_expert(groups, gathered, x, alone))
    assert relative_error(y, mixtures.by_expert(groups, gathered, x, exact)) < ONE_ROUNDING[dtype]


@pytest.mark.parametrize("tile", TILES, ids=name)
def test_ways_of_w4a16_agree_where_sums_are_exact(device, tile: Tile, monkeypatch) -> None:
    """Small integers for x and powers of two for scales: float32 holds every partial sum, whatever the order."""
    n, groups = 24, _groups(device)
    weight = Int4.random(EXPERTS * n, 160, 32, asymmetric=True, device=device)
    weight.scale = torch.full_like(weight.scale, 0.25)
    x = torch.randint(-4, 5, (TOKENS, 160), generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    tiled, meta = weight.tiled(), weight.meta(torch.bfloat16)
    stored = weight.scale, weight.packed_zero_point()
    y = moe_w4a16.fused(x, tiled, meta, n, groups, True, tile)
    assert torch.equal(y, moe_w4a16.grouped_w4a16(x, weight.packed(), *stored, None, None, n, groups, True))
    monkeypatch.setattr(moe_w4a16, "tile_for", lambda *_: Tile("dequantized"))  # as for many rows: codes from the tiles
    assert torch.equal(y, moe_w4a16.grouped_w4a16(x, None, *stored, tiled, meta, n, groups, True))


@pytest.mark.parametrize("tile", TILES, ids=name)
def test_nvfp4a16_is_the_product_of_each_expert_alone_bit_for_bit(device, tile: Tile) -> None:
    n, k, groups = 24, 144, _groups(device)
    weight = Nvfp4.random(EXPERTS * n, k, device=device)
    gathered = not tile.tma
    x = _x(k, gathered, device)
    y = moe_nvfp4a16.fused(x, *weight.tiled(), weight.global_scale, n, groups, gathered, tile)

    def alone(rows: Tensor, expert: int) -> Tensor:
        own = nvfp4a16.tile_nvfp4(weight.packed.chunk(EXPERTS)[expert], weight.scale.chunk(EXPERTS)[expert])
        return nvfp4a16.fused(rows, *own, weight.global_scale, n, None, rows.dtype, tile)

    def exact(rows: Tensor, expert: int) -> Tensor:
        return rows.double() @ weight.scaled_codes().chunk(EXPERTS)[expert].double().t() / weight.global_scale.double()

    expected = mixtures.by_expert(groups, gathered, x, exact)
    assert torch.equal(y, mixtures.by_expert(groups, gathered, x, alone))
    assert relative_error(y, expected) < ONE_ROUNDING[torch.bfloat16]
    by_matrix = moe_nvfp4a16.dequantized(x, *weight.stored(), n, groups, gathered, Tile("x_first", 16, 32, 64))
    assert relative_error(by_matrix, expected) < ONE_ROUNDING[torch.bfloat16]


@pytest.mark.parametrize(("group", "gathered"), [(128, True), (64, False), (32, True), (None, False)])
def test_w4a8_is_the_reference_of_each_rows_expert_bit_for_bit(device, group: int | None, gathered: bool) -> None:
    n, k, groups = 24, 100 if group is None else 256, _groups(device)
    weight = Int4.random(EXPERTS * n, k, group, device=device)
    x, tile = _x(k, gathered, device), Tile("wide", 16, 64)
    qx, scale = quantize_activation_int8(x)
    form = weight.tiled(), weight.meta_int8()
    y = moe_w4a8.run(qx, scale, *form, n, groups, gathered, torch.bfloat16, group is None, tile)

    def expected(rows: Tensor, expert: int) -> Tensor:
        own = _expert(weight, expert)
        return reference.w4a8(rows, own.codes.float(), own.scale)

    assert torch.equal(y, mixtures.by_expert(groups, gathered, x, expected))


def test_what_does_not_fit_is_refused(device) -> None:
    groups, weight = _groups(device), Int4.random(EXPERTS * 24, 160, 32, device=device)
    form = weight.tiled(), weight.meta(torch.bfloat16)
    with pytest.raises(ValueError, match="x has 96 features, which a tiled weight"):
        moe_w4a16.fused(_x(96, True, device), *form, 24, groups, True, TILES[0])
    with pytest.raises(ValueError, match=r"x must be \[12, 160\]"):
        moe_w4a16.fused(_x(160, True, device), *form, 24, groups, False, TILES[0])
    with pytest.raises(ValueError, match=r"needs int8 activations, not torch\.bfloat16"):
        x = _x(160, True, device)
        moe_w4a8.grouped_w4a8(x, x[:, :1].float(), *form, 24, groups, True, torch.bfloat16)
