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
    assert {family for family, *_ in entries} == set(FAMILIES)
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
    tuning._entry.cache_clear()
    with recording(capability):
        for m in (1, 8, 16, 17, 64, 65, 1024, 1025, 4096, 100_000):
            assert tuning.lookup(family, 576, 1536, m, X).block_m >= 8
            assert tuning.lookup(family, 576, 1536, m, X, library=False).way != "library"
    tuning._entry.cache_clear()


def test_a_shape_close_to_a_tuned_one_takes_its_tiles() -> None:
    with recording():
        assert tuning.lookup("dense", 24_000, 4096, 1024, X) == tuning.lookup("dense", 24_576, 4096, 1024, X)
