"""Tile selection: the order of look-up, launchers of grouped products, and the shipped tables."""

import json
import sys
from pathlib import Path

import pytest
import shipped_tables
import torch
from compile_cases import groups_of as groups
from compile_cases import product
from qarl_kernels import tuning
from qarl_kernels.launch import recording
from qarl_kernels.tuning import BACKWARD, FAMILIES, TABLES, Entry, Shape, Tile, default_tile, lookup
from shipped_tables import entries

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from kernel_bench.tuned import dump_tile, format_table

X = torch.empty(1, 8, device="meta")
SHIPPED = sorted(path.stem for path in TABLES.glob("*.json"))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch):
    """Replaces the shipped tables: GPU -> family -> shape -> entry. The GPU is an H200."""
    found: dict[str, tuning.Table] = {}
    monkeypatch.setattr(tuning, "load_table", lambda device: found.get(device, {}))
    monkeypatch.setattr(shipped_tables, "load_table", lambda device: found.get(device, {}))
    monkeypatch.setattr(tuning, "device_name", lambda x: "h200")
    tuning._entries.cache_clear()
    yield found
    tuning._entries.cache_clear()


def test_an_entry_serves_rows_up_to_its_limit_and_the_last_one_all_more() -> None:
    few, many, most = Tile("w_first", 16), Tile("x_first", 128), Tile("library")
    entry = Entry(((16, few), (4095, many), (16384, most)))
    assert [entry.tile(m) for m in (1, 16, 17, 4095, 4096, 10**6)] == [few, few, many, many, most, most]
    assert entry.tile(10**6, library=False) == many


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("device", SHIPPED)
def test_shipped_tables_hold_tiles_that_their_kernels_take(device: str, grouped: bool) -> None:
    fused = {"narrow", "wide", "dequantized"}
    ways = {"w4a16": fused, "nvfp4a16": fused, "w4a8": {"wide"}, "weight_grad": {"x_first"}}
    ways["dense"] = {"x_first", "w_first"} if grouped else {"x_first", "w_first", "library"}
    found = list(entries(device, grouped))
    assert {family for family, *_ in found} <= {*FAMILIES, *(BACKWARD if grouped else ())}
    for family, shape, entry in found:
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


def test_a_shape_survives_the_table_file_and_an_unknown_field_is_an_error() -> None:
    tile = Tile("wide", 64, 64, persistent=True, tma=True)
    rows = [[64, None], [1024, dump_tile(tile)]]
    plain, *grouped = shapes = [Shape(4096, 1024), Shape(1536, 2048, 128, True), Shape(4096, 14_336, 8)]
    data = {"tiles": {"w4a16": {str(plain): rows}}, "experts": {"w4a16": {str(shape): rows for shape in grouped}}}
    read = json.loads(format_table({"device": "a GPU"} | data))
    assert read == {"device": "a GPU"} | data
    assert tuning.parse_table(read) == {"w4a16": {shape: Entry(((64, None), (1024, tile))) for shape in shapes}}
    with pytest.raises(TypeError, match="split_k"):
        tuning.parse_table({"tiles": {"dense": {"1x1": [[1, {"way": "x_first", "split_k": 2}]]}}})


@pytest.mark.parametrize("family", [*FAMILIES, *BACKWARD])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_shapes_without_an_entry_get_a_tile_for_every_number_of_rows(family, capability, tables) -> None:
    for rows in (0, 1, 8, 128, 2048, 100_000):
        tile = default_tile(family, rows, capability == (8, 0), experts=128)
        assert tile.block_m >= 8 and tile.way != "library"
    with recording(capability):
        for m in (1, 8, 16, 17, 64, 65, 1024, 1025, 4096, 100_000) if family in FAMILIES else ():
            assert lookup(family, 576, 1536, m, X).block_m >= 8
            assert lookup(family, 576, 1536, m, X, library=False).way != "library"


@pytest.mark.parametrize("experts", [0, 8])
def test_what_a_table_lacks_is_found_where_it_is_closest(tables, experts: int) -> None:
    """Families, shapes and rows not measured on this GPU: another's tiles, the nearest shape's, defaults."""
    own, other, near, far = (Tile("wide", 64, stages=stages) for stages in range(2, 6))
    shape, gathered = (512, 512, experts, experts > 0), experts > 0
    tables["h200"] = {
        "w4a16": {
            Shape(*shape): Entry(((32, None), (128, own), (256, None))),
            Shape(512, 1024, 2 * experts, gathered): Entry(((64, near), (128, far))),
            Shape(512, 512, experts or 3, False): Entry(((64, near if experts else own),)),
        }
    }
    tables["h100"] = {
        "w4a16": {Shape(*shape): Entry(((16, other), (64, far)))},
        "fp8": {Shape(64, 64): Entry(((8, far),))},
    }

    def found(family: str, n: int, k: int, rows: int, count: int = experts, gathered: bool = gathered) -> Tile:
        return lookup(family, n, k, rows, X, groups=groups(count, 2, rows // 2) if count else None, gathered=gathered)

    with recording():
        assert [found("w4a16", 512, 512, m) for m in (2, 20, 34, 128, 130)] == [other, far, own, own, far]
        # 48 rows of 12 experts are 64 of 16
        assert [found("w4a16", 512, 900, m, 12 if experts else 0) for m in (48, 50)] == [near, far if experts else near]
        assert found("w4a8", 512, 512, 2) == default_tile("w4a8", 2, experts=experts)
        assert found("fp8", 512, 512, 2) == (default_tile("fp8", 2, experts=experts) if experts else far)
        if experts:  # rows sorted by expert have their own tiles
            assert found("w4a16", 512, 512, 20, gathered=False) == near
    with recording((8, 0)):
        assert found("w4a16", 512, 512, 128) == default_tile("w4a16", 128, True, experts=experts)


E, N, K, ROWS = 4, 128, 256, 16
GIVEN = groups(E, 2, ROWS // 2)


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, *BACKWARD])
def test_launchers_ask_the_table(family: str, gathered: bool, tables) -> None:
    if family == "input_grad" and gathered:
        pytest.skip("a gradient's rows are sorted")
    way = {"w4a16": "wide", "nvfp4a16": "wide", "w4a8": "wide", "weight_grad": "x_first"}.get(family, "w_first")
    tile = Tile(way, 32, 64, 128, warps=4, stages=2)
    tables["h200"] = {family: {Shape(N, K, E, gathered): Entry(((ROWS, tile),))}}
    with recording() as launches:
        product(family, GIVEN, N, K, gathered, None)
    (launched,) = launches
    sizes = ("BLOCK_N", "BLOCK_K") if family == "weight_grad" else ("BLOCK_M", "BLOCK_N")
    assert [launched.arguments[name] for name in sizes] == [32, 64]
    assert launched.options["num_stages"] == 2
