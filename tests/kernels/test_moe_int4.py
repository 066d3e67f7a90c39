"""Grouped products of 4-bit weights: the ways against each other, against the dense kernels, and float64."""

from __future__ import annotations

import mixtures
import pytest
import torch
from nvfp4_products import Nvfp4
from products import Int4, random, relative_error
from qarl_kernels import nvfp4a16, reference, w4a8, w4a16
from qarl_kernels.activation import quantize_activation_int8
from qarl_kernels.launch import INTERPRETED
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


def _w4a16(x: Tensor, weight: Int4, tile: Tile, **grouped) -> Tensor:
    return w4a16.w4a16(x, None, weight.scale, None, weight.tiled(), weight.meta(x.dtype), tile=tile, **grouped)


# n of an expert that no tile of 16 rows divides, K that no block of 128 does
@pytest.mark.parametrize(("dtype", "gathered"), [(torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("tile", TILES, ids=name)
def test_w4a16_is_the_product_of_each_expert_alone_bit_for_bit(device, tile: Tile, dtype, gathered: bool) -> None:
    n, k, groups = 24, 160, _groups(device)
    weight = Int4.random(EXPERTS * n, k, 32, dtype=dtype, device=device)
    x = _x(k, gathered, device, dtype)
    y = _w4a16(x, weight, tile, groups=groups, gathered=gathered)

    def alone(rows: Tensor, expert: int) -> Tensor:
        return _w4a16(rows, _expert(weight, expert), tile)

    def exact(rows: Tensor, expert: int) -> Tensor:
        return rows.double() @ _expert(weight, expert).values(dtype).double().t()

    assert torch.equal(y, mixtures.by_expert(groups, gathered, x, alone))
    assert relative_error(y, mixtures.by_expert(groups, gathered, x, exact)) < ONE_ROUNDING[dtype]


@pytest.mark.parametrize("tile", TILES, ids=name)
def test_ways_of_w4a16_agree_where_sums_are_exact(device, tile: Tile) -> None:
    """Small integers for x and powers of two for scales: float32 holds every partial sum, whatever the order."""
    groups = _groups(device)
    weight = Int4.random(EXPERTS * 24, 160, 32, asymmetric=True, device=device)
    weight.scale = torch.full_like(weight.scale, 0.25)
    x = torch.randint(-4, 5, (TOKENS, 160), generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    tiled, meta = weight.tiled(), weight.meta(torch.bfloat16)
    stored = weight.scale, weight.packed_zero_point()
    given = {"groups": groups, "gathered": True}
    y = w4a16.w4a16(x, None, *stored, tiled, meta, **given, tile=tile)
    assert torch.equal(y, w4a16.w4a16(x, weight.packed(), *stored, None, None, **given))
    assert torch.equal(y, w4a16.w4a16(x, None, *stored, tiled, meta, **given, tile=Tile("dequantized")))


@pytest.mark.parametrize("tile", TILES, ids=name)
def test_nvfp4a16_is_the_product_of_each_expert_alone_bit_for_bit(device, tile: Tile) -> None:
    n, k, groups = 24, 144, _groups(device)
    weight = Nvfp4.random(EXPERTS * n, k, device=device)
    gathered = not tile.tma
    x = _x(k, gathered, device)
    given = {"groups": groups, "gathered": gathered}
    y = nvfp4a16.nvfp4a16(x, *weight.stored(), *weight.tiled(), **given, tile=tile)

    def alone(rows: Tensor, expert: int) -> Tensor:
        own = weight.packed.chunk(EXPERTS)[expert], weight.scale.chunk(EXPERTS)[expert]
        return nvfp4a16.nvfp4a16(rows, *own, weight.global_scale, *nvfp4a16.tile_nvfp4(*own), tile=tile)

    def exact(rows: Tensor, expert: int) -> Tensor:
        return rows.double() @ weight.scaled_codes().chunk(EXPERTS)[expert].double().t() / weight.global_scale.double()

    expected = mixtures.by_expert(groups, gathered, x, exact)
    assert torch.equal(y, mixtures.by_expert(groups, gathered, x, alone))
    assert relative_error(y, expected) < ONE_ROUNDING[torch.bfloat16]
    by_matrix = nvfp4a16.nvfp4a16(x, *weight.stored(), *weight.tiled(), **given, tile=Tile("dequantized"))
    assert relative_error(by_matrix, expected) < ONE_ROUNDING[torch.bfloat16]


@pytest.mark.parametrize(("group", "gathered"), [(128, True), (64, False), (32, True), (None, False)])
def test_w4a8_is_the_reference_of_each_rows_expert_bit_for_bit(device, group: int | None, gathered: bool) -> None:
    n, k, groups = 24, 100 if group is None else 256, _groups(device)
    weight = Int4.random(EXPERTS * n, k, group, device=device)
    x, tile = _x(k, gathered, device), Tile("wide", 16, 64)
    qx, scale = quantize_activation_int8(x)
    form = weight.tiled(), weight.meta_int8()
    given = {"groups": groups, "gathered": gathered, "tile": tile}
    y = w4a8.w4a8(qx, scale, *form, k, n, None, torch.bfloat16, group is None, **given)

    def expected(rows: Tensor, expert: int) -> Tensor:
        own = _expert(weight, expert)
        return reference.w4a8(rows, own.codes.float(), own.scale)

    assert torch.equal(y, mixtures.by_expert(groups, gathered, x, expected))


def test_what_does_not_fit_is_refused(device) -> None:
    groups, weight = _groups(device), Int4.random(EXPERTS * 24, 160, 32, device=device)
    x = _x(160, True, device)
    with pytest.raises(ValueError, match="x has 96 features, but a tiled weight"):
        _w4a16(_x(96, True, device), weight, TILES[0], groups=groups, gathered=True)
    with pytest.raises(ValueError, match="x has 6 rows, but these groups need 12, one per sorted pair"):
        _w4a16(x, weight, TILES[0], groups=groups)
    with pytest.raises(ValueError, match="a weight of 72 rows is not that of 5 experts"):
        _w4a16(x, weight, TILES[0], groups=mixtures.grouped(TOKENS, 2, 5, device), gathered=True)
    with pytest.raises(ValueError, match="grouped products take no bias"):
        _w4a16(x, weight, TILES[0], bias=x[0], groups=groups, gathered=True)
    with pytest.raises(ValueError, match=r"needs int8 activations of 160 features, not torch\.bfloat16"):
        form = weight.tiled(), weight.meta(torch.bfloat16)
        w4a8.w4a8(x, x[:, :1].float(), *form, 160, 24, None, torch.bfloat16, groups=groups, gathered=True)
