"""`tools/tune_kernels.py` without a GPU: candidates, shapes of a model, and the tables that it writes."""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from qarl_kernels import tuning
from qarl_kernels.tuning import BACKWARD, FAMILIES, Entry, Tile

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import tune_kernels
from kernel_bench.candidates import candidates
from kernel_bench.tuned import PRODUCTS, TOKENS, GroupedProblem, dump_tile, format_table
from model_sizes import SHAPES

CPU = torch.device("cpu")
SIZES = replace(SHAPES["tiny-moe"], experts=3, per_token=2, hidden=128, inner=128)


def check_candidates(tiles: list[Tile], family: str) -> None:
    """What the kernels of a family promise needs of every tile."""
    assert len(tiles) >= 2 and len(set(tiles)) == len(tiles)
    for tile in tiles:
        if family == "fp8":  # wgmma alone: mma.sync sums FP8 otherwise
            assert tile.warps % 4 == 0 and (tile.block_m if tile.way == "x_first" else tile.block_n) >= 64
        if family == "fp8_block":
            assert 128 % tile.block_n == 0


@pytest.mark.parametrize("family", [*FAMILIES, *BACKWARD])
def test_candidates_keep_what_their_kernels_promise(family: str) -> None:
    for m in tune_kernels.ROWS if family in FAMILIES else ():
        check_candidates(candidates(family, m), family)
    for (experts, slots), tokens, gathered in itertools.product([(128, 8), (8, 2)], TOKENS, (True, False)):
        mean = tokens * slots / experts
        tiles = candidates(family, -(-tokens * slots // experts), True, gathered)
        check_candidates(tiles, family)
        for tile in tiles:
            assert tile.way != "wide" or family == "w4a8" or tile.block_n >= 64
            if tile.way != "dequantized" and family not in BACKWARD:
                assert tile.block_m <= max(256, 4 * mean) and (mean > 8 or tile.block_m <= 16), tile


def test_shapes_are_those_of_a_models_packed_weights(tiny_model) -> None:
    assert tune_kernels.shapes_of_model(tiny_model()) == [(64, 64), (64, 128), (128, 64), (256, 64)]
    assert tune_kernels.shapes_of_model(tiny_model("mixtral")) == [(64, 64), (128, 64)]
    assert tune_kernels.shapes_of_model(tiny_model("qwen2_moe")) == [(64, 64), (64, 96), (128, 64), (192, 64)]


def test_what_was_not_measured_stays_or_is_left_to_another_table() -> None:
    few, some, many = Tile("narrow", 8), Tile("wide", 64), Tile("wide")
    alone = tune_kernels.merged({64: some, 128: some, 256: many})
    assert alone == [[32, None], [128, dump_tile(some)], [256, dump_tile(many)], [16384, None]]
    old = Entry(((16, few), (100, many), (16384, few)))
    kept = tune_kernels.merged({128: some}, old)
    assert kept == [[16, dump_tile(few)], [64, dump_tile(many)], [128, dump_tile(some)], [16384, dump_tile(few)]]
    last = tune_kernels.merged({16384: some}, Entry(()))
    assert last == [[4096, None], [16384, dump_tile(some)]]


def clock(times: dict[Tile, float]) -> SimpleNamespace:
    """A stopwatch that says these times, and 100 for other tiles."""
    return SimpleNamespace(microseconds=lambda call, reps: times.get(call.args[0], 100.0))


def test_the_fastest_tile_with_the_right_bits_is_chosen_and_compared_with_the_tables(monkeypatch, capsys) -> None:
    wrong, fast = Tile("wide", 128, 128, warps=4, stages=2, tma=True), Tile("wide", 64, 64, stages=4, tma=True)
    problem = tune_kernels.Problem("w4a16", 256, 128, torch.device("cpu"))
    monkeypatch.setattr(problem, "product", lambda tile: torch.full((1,), float(tile == wrong)))
    done = tune_kernels.tune(problem, [256], clock({wrong: 1.0, fast: 50.0}))
    said = capsys.readouterr().out
    assert done == {256: fast} and "other bits" in said and "2.00 times as fast as" in said


def test_what_is_measured_of_experts_is_found_again(monkeypatch, tmp_path: Path) -> None:
    """By sorted rows and by their shape, next to what stood in the table."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    out = tmp_path / "h200.json"
    out.write_text(format_table({"tiles": {"fp8": {"64x64": [[8, {"way": "x_first"}]]}}}))
    fast = Tile("w_first", 16, 64, stages=4)

    for which in PRODUCTS:
        problem = GroupedProblem("dense", SIZES, which, torch.device("meta"))
        for name, result in (("product", torch.zeros(1)), ("rows", None), ("known", fast)):
            monkeypatch.setattr(problem, name, lambda given, result=result: result)
        tune_kernels.save(out, problem, tune_kernels.tune(problem, [4, 16], clock({fast: 5.0})))
    table = json.loads(out.read_text())
    found = tuning.parse_table(table)
    assert table["device"] == "NVIDIA H200" and found["fp8"][tuning.Shape(64, 64)].tile(1) == Tile("x_first")
    for shape in (tuning.Shape(256, 128, 3, True), tuning.Shape(128, 128, 3)):
        assert found["dense"][shape].tile(2) is None  # one token was not measured
        assert [found["dense"][shape].tile(rows) for rows in (3, 8, 32)] == [fast] * 3
