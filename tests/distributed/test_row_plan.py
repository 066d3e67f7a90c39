"""Cuts of masters into rows: whole units, in order, nothing twice and nothing left out."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qarl_formats.registry import make_scheme, scheme_names

from qarl.distributed.rows import RowPlan, cut, row_unit, stacked_experts


@settings(deadline=None)
@given(st.integers(0, 300) | st.integers(0, 9), st.sampled_from([1, 8, 128]), st.integers(1, 9))
def test_ranges_cover_the_rows_in_whole_units(rows: int, unit: int, count: int) -> None:
    ranges = cut(rows, unit, count)
    assert len(ranges) == count and [row for some in ranges for row in some] == list(range(rows))
    assert all(some.start % unit == 0 or some.start == rows for some in ranges)
    filled = [some for some in ranges if some]
    assert len({len(some) for some in filled[:-1]}) <= 1 and ranges[: len(filled)] == filled
    units = math.ceil(rows / unit)
    assert all(len(some) <= math.ceil(units / count) * unit for some in ranges)


def expert_shapes(count: int, rows: int = 6) -> dict[str, tuple[int, int]]:
    """Of a layer with a router and of one without experts."""
    shapes = {"model.layers.0.mlp.gate.weight": (count, 4)}
    for expert in (f"model.layers.0.mlp.experts.{index}" for index in range(count)):
        shapes |= {f"{expert}.{leaf}_proj.weight": (rows, 4) for leaf in ("gate", "up")}
        shapes[f"{expert}.down_proj.weight"] = (4, rows)
    return shapes | {f"model.layers.1.mlp.{leaf}_proj.weight": (8, 4) for leaf in ("gate", "up", "down")}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 40])
def test_a_stack_is_cut_as_one_tensor(count: int) -> None:
    shapes = expert_shapes(3)
    stacks = list(stacked_experts(shapes, lambda name: None))
    of = "model.layers.0.mlp.experts"
    gate_up = [f"{of}.{index}.{leaf}_proj.weight" for index in range(3) for leaf in ("gate", "up")]
    assert stacks == [gate_up, [f"{of}.{index}.down_proj.weight" for index in range(3)]]
    plan = RowPlan(shapes, lambda name: 2, count, stacks)
    lone = [(name,) for name in shapes if ".experts." not in name]
    assert plan.blocks == [lone[0], *map(tuple, stacks), *lone[1:]]
    for block in plan.blocks:
        rows = [shapes[name][0] for name in block]
        assert plan.block_shape(block) == (sum(rows), shapes[block[0]][1]) and plan.unit(block) == 2
        assert plan.block_cut(block) == cut(sum(rows), 2, count)
        for rank, own in enumerate(plan.block_cut(block)):
            held = [(name, row) for name in block for row in range(shapes[name][0])][own.start : own.stop]
            assert held == [(name, row) for name in block for row in plan.cut(name)[rank]]
        for name in block:
            assert len(plan.cut(name)) == count and plan.cut(name)[-1].stop == shapes[name][0]
            assert [row for some in plan.cut(name) for row in some] == list(range(shapes[name][0]))


def test_experts_without_whole_units_or_with_other_schemes_are_cut_alone() -> None:
    symmetric, asymmetric = make_scheme("w4a16", 32), make_scheme("w4a16", 32, symmetric=False)
    assert len(list(stacked_experts(expert_shapes(2, 8), lambda name: symmetric))) == 2
    assert list(stacked_experts(expert_shapes(2, 12), lambda name: asymmetric)) == []  # rows of 12 and of 4
    assert [len(stack) for stack in stacked_experts(expert_shapes(2, 16), lambda name: asymmetric)] == [4]
    kept = "model.layers.0.mlp.experts.1.up_proj.weight"
    found = list(stacked_experts(expert_shapes(3), lambda name: None if name == kept else symmetric))
    assert [len(stack) for stack in found] == [5, 3, 1] and found[2] == [kept]


@pytest.mark.parametrize("scheme", [*scheme_names(lambda kind: kind.weight_bits is not None), "w4a16 asymmetric"])
def test_units_are_the_rows_that_can_be_concatenated(scheme: str) -> None:
    made = make_scheme(scheme.split()[0], symmetric="asymmetric" not in scheme)
    unit = row_unit(made)
    assert made.can_concatenate([unit, 5]) and made.can_concatenate([3 * unit, unit])
    assert unit == 1 or not made.can_concatenate([unit - 1, 5])
    assert row_unit(None) == 1
