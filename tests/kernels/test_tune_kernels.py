"""`tools/tune_kernels.py` without a GPU: what it would try, which shapes it reads from a model, what it writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from qarl_kernels.tuning import FAMILIES, Tile
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


def test_neighbours_with_the_same_tile_become_one_range() -> None:
    few, many = Tile("w_first", 16), Tile("x_first")
    assert [m for m, _ in tune_kernels.merged([(1, few), (16, few), (64, many), (128, few)])] == [16, 64, 128]
