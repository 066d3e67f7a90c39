"""`tools/tune_kernels.py` without a GPU: what it would try, which shapes it reads from a model, what it writes."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from qarl_kernels import tuning
from qarl_kernels.tuning import FAMILIES, Entry, Tile, dump_tile
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import tune_kernels


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("m", tune_kernels.ROWS)
def test_candidates_keep_what_their_kernels_promise(family: str, m: int) -> None:
    tiles = tune_kernels.candidates(family, m)
    assert len(tiles) >= 2 and len(set(tiles)) == len(tiles)
    for tile in tiles:
        if family == "fp8":  # wgmma alone: mma.sync sums FP8 otherwise
            assert tile.warps % 4 == 0 and (tile.block_m if tile.way == "x_first" else tile.block_n) >= 64
        if family == "fp8_block":
            assert 128 % tile.block_n == 0


def test_every_candidate_is_recorded_for_compilation_before() -> None:
    rows = [16, 1024]
    launches = tune_kernels.launches_of(["w4a16", "fp8"], rows, (9, 0))
    tiles = {(f, t) for f in ("w4a16", "fp8") for m in rows for t in tune_kernels.candidates(f, m)}
    assert len(launches) == sum(tile.way != "dequantized" for _, tile in tiles)


def test_shapes_come_from_the_headers_of_a_model(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.down_proj.weight": torch.zeros(64, 128),
        "model.layers.1.mlp.down_proj.weight": torch.zeros(64, 128),
        "model.layers.0.self_attn.q_proj.weight_packed": torch.zeros(96, 8, dtype=torch.int32),
        "model.embed_tokens.weight": torch.zeros(300, 64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert tune_kernels.shapes_of_model(tmp_path) == [(64, 128), (96, 64)]


def test_directories_without_a_model_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no safetensors files; give a Hugging Face model directory"):
        tune_kernels.shapes_of_model(tmp_path)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(SystemExit, match="give the shapes with --shapes NxK"):
        tune_kernels.shapes_of_model(tmp_path)


def test_what_was_not_measured_stays_or_is_left_to_another_table() -> None:
    few, some, many = Tile("narrow", 8), Tile("wide", 64), Tile("wide")
    alone = tune_kernels.merged({64: some, 128: some, 256: many})
    assert alone == [[32, None], [128, dump_tile(some)], [256, dump_tile(many)], [16384, None]]
    old = Entry(((16, few), (100, many), (16384, few)))
    kept = tune_kernels.merged({128: some}, old)
    assert kept == [[16, dump_tile(few)], [64, dump_tile(many)], [128, dump_tile(some)], [16384, dump_tile(few)]]
    last = tune_kernels.merged({16384: some}, Entry(()))
    assert last == [[4096, None], [16384, dump_tile(some)]]


class Clock:
    """A stopwatch without a GPU: the time of a tile is what the test says."""

    def __init__(self, times: dict[Tile, float]) -> None:
        self.times = times

    def microseconds(self, call: partial, reps: int) -> float:
        return self.times.get(call.args[0], 100.0)


def problem(monkeypatch: pytest.MonkeyPatch, wrong: Tile | None = None) -> tune_kernels.Problem:
    """w4a16 of small numbers, whose products are done by nobody: all tiles but one give the same bits."""
    made = tune_kernels.Problem("w4a16", 256, 128, torch.device("cpu"))
    monkeypatch.setattr(made, "product", lambda tile: torch.full((1,), float(tile == wrong)))
    return made


def test_the_fastest_tile_with_the_right_bits_is_chosen_and_compared_with_the_tables(monkeypatch, capsys) -> None:
    wrong, fast = Tile("wide", 128, 128, warps=4, stages=2, tma=True), Tile("wide", 64, 64, stages=4, tma=True)
    done = tune_kernels.tune(problem(monkeypatch, wrong), [256], Clock({wrong: 1.0, fast: 50.0}))
    assert done.tiles == {256: fast} and done.gains == {256: 2.0}
    assert "other bits" in done.notes[0] and "2.00 times as fast as" in capsys.readouterr().out


def test_when_the_time_is_over_a_few_tiles_are_tried_all_the_same(monkeypatch) -> None:
    before = tuning.lookup("w4a16", 256, 128, 64, torch.empty(64, 128))
    done = tune_kernels.tune(problem(monkeypatch), [64], Clock({before: 10.0}), deadline=0.0)
    assert done.tiles == {64: before} and "not tried" in done.notes[0]
