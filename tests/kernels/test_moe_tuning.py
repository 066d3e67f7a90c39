"""Tiles of grouped products: what is chosen when, that the launchers ask, and what the shipped tables hold."""

from __future__ import annotations

import json

import pytest
import torch
from qarl_kernels import tuning
from qarl_kernels.launch import recording
from qarl_kernels.moe import backward, codes, dense, fp8_block, nvfp4a16, w4a8, w4a16
from qarl_kernels.moe import tuning as moe_tuning
from qarl_kernels.moe.groups import Groups
from qarl_kernels.moe.tuning import FAMILIES, Shape, default_tile, tile_for
from qarl_kernels.tuning import TABLES, Entry, Tile
from torch import Tensor

X = torch.empty(1, 8, device="meta")
SHIPPED = sorted(path.stem for path in TABLES.glob("*.json"))
BF16, FP32 = torch.bfloat16, torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def groups(experts: int, slots: int, tokens: int) -> Groups:
    order = empty(tokens * slots, dtype=torch.int32)
    return Groups(experts, slots, order, order, empty(experts + 1, dtype=torch.int32))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch):
    """Takes the place of what is shipped: GPU -> family -> shape -> entry. The GPU here is an H200."""
    found: dict[str, moe_tuning.Table] = {}
    monkeypatch.setattr(moe_tuning, "load_table", lambda device: found.get(device, {}))
    monkeypatch.setattr(moe_tuning, "device_name", lambda x: "h200")
    moe_tuning._entries.cache_clear()
    yield found
    moe_tuning._entries.cache_clear()


def test_a_shape_survives_the_table_file() -> None:
    tile, shapes = Tile("wide", 64, 64, tma=True), [Shape(128, 1536, 2048, True), Shape(8, 4096, 14_336, False)]
    data = {"experts": {"w4a16": {str(shape): [[64, None], [1024, tuning.dump_tile(tile)]] for shape in shapes}}}
    text = tuning.format_table({"device": "a GPU", "tiles": {"fp8": {"1x2": [[3, {"way": "x_first"}]]}}} | data)
    read = json.loads(text)
    assert moe_tuning.parse_table(read) == {"w4a16": {shape: Entry(((64, None), (1024, tile))) for shape in shapes}}
    assert read["device"] == "a GPU" and tuning.parse_table(read)["fp8"][1, 2].tile(1) == Tile("x_first")
    assert json.loads(tuning.format_table(data)) == data
    for wrong in ("128x1536", "8x256x128 dense", "8x256x128gathered"):
        with pytest.raises(ValueError):
            Shape.parse(wrong)


def test_what_a_table_lacks_is_found_where_it_is_closest(tables) -> None:
    """Rows not measured on this GPU: another's tiles; other shapes: the nearest one's, by rows an expert; defaults."""
    own, other, near, far = (Tile("wide", 64, stages=stages) for stages in range(2, 6))
    shape = Shape(8, 512, 512, True)
    tables["h200"] = {
        "w4a16": {
            shape: Entry(((32, None), (128, own), (256, None))),
            Shape(16, 512, 1024, True): Entry(((64, near), (128, far))),
        }
    }
    tables["h100"] = {"w4a16": {shape: Entry(((16, other), (64, far)))}}
    with recording():
        found = [tile_for("w4a16", groups(8, 2, tokens), 512, 512, True, X) for tokens in (1, 10, 17, 64, 65)]
        assert found == [other, far, own, own, far]
        # 48 rows of 12 experts are 64 of 16
        assert [tile_for("w4a16", groups(12, 2, tokens), 512, 900, True, X) for tokens in (24, 25)] == [near, far]
        assert tile_for("fp8", groups(8, 2, 3), 512, 512, True, X) == default_tile("fp8", 6, 8, False)
    with recording((8, 0)):
        assert tile_for("w4a16", groups(8, 2, 64), 512, 512, True, X) == default_tile("w4a16", 128, 8, True)


def test_products_of_tokens_rows_and_of_sorted_ones_take_their_own_tiles(tables) -> None:
    of_tokens, of_rows = Tile("w_first", 16), Tile("w_first", 32)
    tables["h200"] = {
        "dense": {
            Shape(8, 256, 256, True): Entry(((64, of_tokens),)),
            Shape(8, 256, 256, False): Entry(((64, of_rows),)),
        }
    }
    with recording():
        assert tile_for("dense", groups(8, 2, 1), 200, 256, True, X) == of_tokens
        assert tile_for("dense", groups(8, 2, 1), 256, 200, False, X) == of_rows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("before_hopper", [False, True])
def test_there_is_a_default_for_every_number_of_rows(family: str, before_hopper: bool) -> None:
    for rows in (0, 1, 8, 128, 2048, 100_000):
        tile = default_tile(family, rows, 128, before_hopper)
        assert tile.block_m >= 8 and tile.way != "library"


def test_defaults_put_64_rows_of_the_weight_first_where_experts_have_few() -> None:
    assert default_tile("dense", 8, 128, False).way == "w_first" and default_tile("dense", 8, 128, False).block_m == 16
    assert default_tile("dense", 128 * 600, 128, False).block_m == 128
    assert default_tile("input_grad", 8, 128, True).way == "x_first"


E, N, K, ROWS = 4, 128, 256, 16
GIVEN = groups(E, 2, ROWS // 2)
TILED = empty(E * N // 16, K // 128, 16, 16, dtype=torch.int32)


def _launch(family: str, gathered: bool) -> None:
    """The function that a scheme calls."""
    rows = ROWS // 2 if gathered else ROWS
    x, rest = empty(rows, K), (N, GIVEN, gathered)
    int8, e4m3 = x.to(torch.int8), x.to(torch.float8_e4m3fn)
    scale, width = empty(rows, 1, dtype=FP32), E * N
    if family == "dense":
        dense.grouped_dense(x, empty(width, K), GIVEN, gathered)
    elif family == "w4a16":
        meta = empty(K // 128, width, dtype=torch.int32)
        w4a16.grouped_w4a16(x, None, empty(width, K // 128), None, TILED, meta, *rest)
    elif family == "w4a8":
        w4a8.grouped_w4a8(int8, scale, TILED, empty(K // 128, width, dtype=FP32), *rest, BF16)
    elif family == "nvfp4a16":
        scales = empty(width, K // 16).to(torch.float8_e4m3fn), empty(1, dtype=FP32)
        tiled = TILED, empty(2 * (K // 128), width, dtype=torch.int32)
        nvfp4a16.grouped_nvfp4a16(x, None, *scales, *tiled, *rest)
    elif family == "w8a8":
        codes.grouped_w8a8(int8, scale, empty(width, K, dtype=torch.int8), empty(width, 1), *rest, BF16)
    elif family == "fp8":
        codes.grouped_fp8(e4m3, scale, empty(width, K, dtype=e4m3.dtype), empty(width, 1), *rest, BF16)
    elif family == "fp8_block":
        scales = empty(rows, K // 128, dtype=FP32), empty(width // 128, K // 128)
        fp8_block.grouped_fp8_block(e4m3, scales[0], empty(width, K, dtype=e4m3.dtype), scales[1], *rest, BF16)
    elif family == "input_grad":
        backward.grouped_input_grad(empty(ROWS, N), empty(width, K), GIVEN)
    else:
        backward.grouped_weight_grad(empty(ROWS, N), x, GIVEN, gathered, empty(width, K, dtype=FP32))


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_launchers_ask_the_table(family: str, gathered: bool, tables) -> None:
    if family == "input_grad" and gathered:
        pytest.skip("a gradient's rows are sorted")
    way = {"w4a16": "wide", "nvfp4a16": "wide", "w4a8": "wide", "weight_grad": "x_first"}.get(family, "w_first")
    tile = Tile(way, 32, 64, 128, warps=4, stages=2)
    tables["h200"] = {family: {Shape(E, N, K, gathered): Entry(((ROWS, tile),))}}
    with recording() as launches:
        _launch(family, gathered)
    (launched,) = launches
    sizes = ("BLOCK_N", "BLOCK_K") if family == "weight_grad" else ("BLOCK_M", "BLOCK_N")
    assert [launched.arguments[name] for name in sizes] == [32, 64]
    assert launched.options["num_stages"] == 2


def test_rows_of_tokens_are_put_in_order_for_the_accelerator(tables) -> None:
    tile = Tile("wide", 64, 64, tma=True)
    for gathered in (True, False):
        tables["h200"] = {"w4a16": {Shape(E, N, K, gathered): Entry(((ROWS, tile),))}}
        moe_tuning._entries.cache_clear()
        with recording() as launches:
            _launch("w4a16", gathered)
        assert [launch.kernel.__name__ for launch in launches] == ["_copy_kernel"] * gathered + ["wide_kernel"]
        assert launches[-1].arguments["TMA"] and not launches[-1].arguments["GATHERED"]


@pytest.mark.parametrize("device", SHIPPED)
def test_shipped_tables_hold_tiles_that_their_kernels_take(device: str) -> None:
    fused = {"narrow", "wide", "dequantized"}
    ways = {"w4a16": fused, "nvfp4a16": fused, "w4a8": {"wide"}, "weight_grad": {"x_first"}}
    for family, shape, entry in moe_tuning.entries(device):
        assert family in FAMILIES
        limits = [most for most, _ in entry.tiles]
        assert limits == sorted(set(limits)), f"{family} {shape}"
        for _, tile in entry.tiles:
            assert tile is not None and tile.way in ways.get(family, {"x_first", "w_first"}), (
                f"{family} {shape}: {tile}"
            )
            assert tile.way != "wide" or family == "w4a8" or tile.block_n >= 64
            if family == "fp8":  # chains of mma.sync have other bits than wgmma's: 64 rows or more come first
                first = tile.block_m if tile.way == "x_first" else tile.block_n
                assert first >= 64 and tile.warps % 4 == 0, f"{shape}: {tile}"
            if family == "fp8_block":
                assert 128 % tile.block_n == 0
