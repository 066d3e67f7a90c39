"""Cuts of masters into rows: whole units, in order, nothing twice and nothing left out."""

import math

import pytest
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.stacked import stackable

from qarl.distributed.rows import RowPlan, cut, row_unit


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("unit", [1, 8, 128])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 96, 129, 1024])
def test_ranges_cover_the_rows_in_whole_units(rows: int, unit: int, count: int) -> None:
    ranges = cut(rows, unit, count)
    assert len(ranges) == count and [row for some in ranges for row in some] == list(range(rows))
    assert all(some.start % unit == 0 or some.start == rows for some in ranges)
    filled = [some for some in ranges if some]
    assert len({len(some) for some in filled[:-1]}) <= 1 and ranges[: len(filled)] == filled
    units = math.ceil(rows / unit)
    assert all(len(some) <= math.ceil(units / count) * unit for some in ranges)


def test_a_plan_cuts_each_master_by_its_own_unit() -> None:
    plan = RowPlan({"a": (24, 4), "b": (24,)}, lambda name: 8 if name == "a" else 1, 2)
    assert plan.cut("a") == [range(0, 16), range(16, 24)] and plan.cut("b") == [range(0, 12), range(12, 24)]
    assert plan.shapes == {"a": (24, 4), "b": (24,)} and plan.count == 2


@pytest.mark.parametrize("scheme", [*scheme_names(lambda kind: kind.weight_bits is not None), "w4a16 asymmetric"])
def test_units_are_what_may_be_put_under_one_another(scheme: str) -> None:
    made = make_scheme(scheme.split()[0], symmetric="asymmetric" not in scheme)
    unit = row_unit(made)
    assert stackable(made, [unit, 5]) and stackable(made, [3 * unit, unit])
    assert unit == 1 or not stackable(made, [unit - 1, 5])
    assert row_unit(None) == 1
