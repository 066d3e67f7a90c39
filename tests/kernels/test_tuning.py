"""Tile tables: what is chosen when, and that the shipped tables parse."""

from __future__ import annotations

import json

import pytest
import torch
from qarl_kernels import tuning
from qarl_kernels.launch import recording
from qarl_kernels.tuning import FAMILIES, TABLES, Entry, Tile

X = torch.empty(1, 8, device="meta")
SHIPPED = sorted(path.stem for path in TABLES.glob("*.json"))


def test_an_entry_serves_rows_up_to_its_limit_and_the_last_one_all_more() -> None:
    few, many, most = Tile("w_first", 16), Tile("x_first", 128), Tile("library")
    entry = Entry(((16, few), (4095, many), (16384, most)))
    assert [entry.tile(m) for m in (1, 16, 17, 4095, 4096, 10**6)] == [few, few, many, many, most, most]
    assert entry.tile(10**6, library=False) == many


@pytest.mark.parametrize("device", SHIPPED)
def test_shipped_tables_hold_tiles_that_their_kernels_take(device: str) -> None:
    fused = {"narrow", "wide", "dequantized"}
    ways = {"w4a16": fused, "nvfp4a16": fused, "w4a8": {"wide"}, "dense": {"x_first", "w_first", "library"}}
    entries = list(tuning.entries(device))
    assert {family for family, *_ in entries} <= set(FAMILIES)
    for family, n, k, entry in entries:
        limits = [most for most, _ in entry.tiles]
        assert limits == sorted(set(limits)), f"{family} {n}x{k}"
        for _, tile in entry.tiles:
            assert tile.way in ways.get(family, {"x_first", "w_first"}), f"{family} {n}x{k}: {tile}"
            if family == "fp8":  # chains of mma.sync have other bits than wgmma's: 64 rows or more come first
                first = tile.block_m if tile.way == "x_first" else tile.block_n
                assert first >= 64 and tile.warps % 4 == 0, f"{n}x{k}: {tile}"
            if family == "fp8_block":
                assert 128 % tile.block_n == 0


def test_a_tile_survives_the_table_file() -> None:
    tile = Tile("x_first", 64, 256, 64, 8, 4, True, True)
    data = {"tiles": {"dense": {"4096x1024": [[64, tuning.dump_tile(tile)], [128, {"way": "library"}]]}}}
    table = tuning.parse_table(json.loads(tuning.format_table({"device": "a GPU"} | data)))
    assert table["dense"][4096, 1024].tiles == ((64, tile), (128, Tile("library")))


def test_an_unknown_field_in_a_table_is_an_error() -> None:
    with pytest.raises(TypeError, match="split_k"):
        tuning.parse_table({"tiles": {"dense": {"1x1": [[1, {"way": "x_first", "split_k": 2}]]}}})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_shapes_without_an_entry_get_a_tile_for_every_number_of_rows(family, capability, monkeypatch) -> None:
    monkeypatch.setattr(tuning, "load_table", lambda device: {})
    tuning._entries.cache_clear()
    with recording(capability):
        for m in (1, 8, 16, 17, 64, 65, 1024, 1025, 4096, 100_000):
            assert tuning.lookup(family, 576, 1536, m, X).block_m >= 8
            assert tuning.lookup(family, 576, 1536, m, X, library=False).way != "library"
    tuning._entries.cache_clear()


def test_a_shape_close_to_a_tuned_one_takes_its_tiles() -> None:
    with recording():
        assert tuning.lookup("dense", 24_000, 4096, 1024, X) == tuning.lookup("dense", 24_576, 4096, 1024, X)


def test_what_a_table_lacks_is_found_where_it_is_closest(monkeypatch) -> None:
    """Families, shapes and rows not measured on this GPU: another's tiles, the nearest shape's, defaults."""
    own, other, near, far = (Tile("wide", 64, stages=stages) for stages in range(2, 6))
    tables = {
        "h200": {
            "w4a16": {(512, 512): Entry(((32, None), (128, own), (256, None))), (512, 1024): Entry(((64, near),))}
        },
        "h100": {"w4a16": {(512, 512): Entry(((16, other), (64, far)))}, "fp8": {(64, 64): Entry(((8, far),))}},
    }
    monkeypatch.setattr(tuning, "load_table", lambda device: tables.get(device, {}))
    monkeypatch.setattr(tuning, "device_name", lambda x: "h200")
    tuning._entries.cache_clear()
    with recording():
        found = [tuning.lookup("w4a16", 512, 512, m, X) for m in (1, 20, 33, 128, 129)]
        assert found == [other, far, own, own, far]
        assert tuning.lookup("w4a16", 512, 900, 1, X) == near
        assert tuning.lookup("fp8", 512, 512, 1, X) == far
        assert tuning.lookup("w4a8", 512, 512, 1, X) == tuning.default_tile("w4a8", 1)
    tuning._entries.cache_clear()


def test_rows_that_were_not_measured_are_no_tiles_of_the_table(monkeypatch) -> None:
    data = {"tiles": {"fp8": {"64x64": [[8, None], [16, {"way": "x_first"}], [32, None]]}}}
    monkeypatch.setattr(tuning, "load_table", lambda device: tuning.parse_table(data))
    assert list(tuning.entries("h200")) == [("fp8", 64, 64, Entry(((16, Tile("x_first")),)))]
    assert tuning.parse_table(data)["fp8"][64, 64].tile(100) is None
