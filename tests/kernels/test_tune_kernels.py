"""`tools/tune_kernels.py` without a GPU: candidates, shapes of a model, and the tables that it writes."""

import itertools
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from kernel_harness import NEEDS_TRITON
from mixtures import weight_grad
from products import relative_error
from qarl_kernels import tuning
from qarl_kernels.launch import recording
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


@pytest.mark.parametrize("grouped", [False, True])
def test_every_candidate_is_recorded_for_compilation_before(grouped: bool) -> None:
    few = [4, 1024] if grouped else [16, 1024]

    def made(family: str) -> list[partial]:
        if not grouped:
            return [partial(tune_kernels.Problem, family, 4096, 4096)]
        return [partial(GroupedProblem, family, SIZES, which) for which in PRODUCTS]

    with recording((9, 0)) as launches:
        tune_kernels.launch_all([(make, few) for make in made("w8a8")])
    tried = set()
    for number, make in enumerate(made("w8a8")):
        problem = make(torch.device("meta"))
        for m in few:
            problem.rows(m)
            given = (-(-2 * m // 3), True, PRODUCTS[number] == "gate_up") if grouped else (m,)
            tried |= {(number, tile) for tile in (problem.known(m), *candidates("w8a8", *given))}
    assert len(launches) == len(tried)
    with recording((9, 0)) as fused:
        tune_kernels.launch_all([(make, [1024]) for make in made("w4a16")])
    assert any("dequantize" in launch.kernel.__name__ for launch in fused)


def test_shapes_are_those_of_a_models_packed_weights(tmp_path: Path, tiny_model) -> None:
    with pytest.raises(SystemExit, match="give a Hugging Face model directory"):
        tune_kernels.shapes_of_model(tmp_path)
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
    said = capsys.readouterr().out
    assert done == {256: fast} and "other bits" in said and "2.00 times as fast as" in said


def test_a_tile_that_could_not_be_timed_is_left_out(monkeypatch, capsys) -> None:
    known = tuning.lookup("w4a16", 256, 128, 64, torch.empty(64, 128))

    class Slow(Clock):
        def microseconds(self, call: partial, reps: int) -> float:
            if call.args[0] != known:
                raise tune_kernels.Late("the host was slower")
            return 10.0

    done = tune_kernels.tune(problem(monkeypatch), [64], Slow({}))
    assert done == {64: known} and ": Late\n" in capsys.readouterr().out


@NEEDS_TRITON
@pytest.mark.parametrize("which", PRODUCTS)
def test_the_ways_of_w4a16_multiply_with_the_same_random_weight(which: str) -> None:
    problem = GroupedProblem("w4a16", SIZES, which, CPU)
    problem.rows(3)
    fused = problem.product(Tile("narrow", 16, 64))
    assert fused.shape == (6, 256 if which == "gate_up" else 128)
    assert relative_error(fused, problem.product(Tile("dequantized")).double()) < 2**-8


@NEEDS_TRITON
def test_a_weights_gradient_is_timed_where_it_adds_and_compared_from_zero() -> None:
    problem = GroupedProblem("weight_grad", SIZES, "gate_up", CPU)
    problem.rows(6)
    tile, expected = Tile("x_first", 64, 64, 16), weight_grad(problem.groups, True, problem.dy, problem.x)
    first = problem.product(tile)
    assert relative_error(first, expected) < 1e-5
    problem.timed(tile)
    assert relative_error(problem.into, 2 * expected) < 1e-5
    assert torch.equal(problem.product(tile), first)


def test_what_is_measured_of_experts_is_found_again(monkeypatch, tmp_path: Path) -> None:
    """By sorted rows and by their shape, next to what stood in the table."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    out = tmp_path / "h200.json"
    out.write_text(format_table({"tiles": {"fp8": {"64x64": [[8, {"way": "x_first"}]]}}}))
    fast = Tile("w_first", 16, 64, stages=4)

    def measure(family: str) -> None:
        for which in PRODUCTS:
            problem = GroupedProblem(family, SIZES, which, torch.device("meta"))
            monkeypatch.setattr(problem, "product", lambda tile: torch.zeros(1))
            monkeypatch.setattr(problem, "rows", lambda m: None)
            monkeypatch.setattr(problem, "known", lambda m: fast)
            found = tune_kernels.tune(problem, [4, 16], Clock({fast: 5.0}))
            tune_kernels.save(out, problem, found)

    for family in ("dense", "fp8_block", "w8a8"):
        measure(family)
    table = json.loads(out.read_text())
    found = tuning.parse_table(table)
    assert table["device"] == "NVIDIA H200" and found["fp8"][tuning.Shape(64, 64)].tile(1) == Tile("x_first")
    assert set(table["experts"]) == {"dense", "fp8_block", "w8a8"}
    for shape in (tuning.Shape(256, 128, 3, True), tuning.Shape(128, 128, 3)):
        assert found["dense"][shape].tile(2) is None  # one token was not measured
        assert [found["dense"][shape].tile(rows) for rows in (3, 8, 32)] == [fast] * 3
    assert not list(tmp_path.glob("*.part"))


def test_experts_are_tuned_one_family_after_the_other_and_a_wrong_command_line_is_refused(capsys) -> None:
    for wrong, message in (
        (["--shapes", "64x64", "--families", "input_grad"], "input_grad is of grouped products; name a model with"),
        (["--experts", "mixtral-8x7b", "--m", "0"], "--m takes numbers from 1"),
        (["--shapes", "64"], "'64' is not a shape; write NxK"),
    ):
        with pytest.raises(SystemExit):
            tune_kernels.parse(wrong)
        assert message in capsys.readouterr().err
    arguments = tune_kernels.parse(["--experts", "tiny-moe", "mixtral-8x7b", "--families", "w4a16", "weight_grad"])
    parts = tune_kernels.parts_of(arguments)
    assert [len(part) for part in parts] == [2] * 4
    assert [part[0][1][0] for part in parts] == [1, 1024] * 2
    assert len(tune_kernels.parse(["--experts", "tiny-moe"]).families) == len(FAMILIES) + 2
    (part,) = tune_kernels.parts_of(tune_kernels.parse(["--shapes", "64x128", "64x100", "--m", "8"]))
    assert len(part) == 2 * len(FAMILIES) - 2  # the tiled int4 weights need whole blocks of K
