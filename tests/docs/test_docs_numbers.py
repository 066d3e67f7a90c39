"""Numbers of the README against the records in benchmarks/results, and its size."""

from __future__ import annotations

import json
import re

import pytest
from pages import ROOT

README = (ROOT / "README.md").read_text()
ROW = re.compile(r"^\| (\w+) \| (\w+)[^|]*\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def record(device: str) -> dict[str, dict[str, float]]:
    return json.loads((ROOT / f"benchmarks/results/schemes_{device}.json").read_text())["cases"]


def test_the_readme_is_short():
    assert len(README.encode()) <= 10_000


@pytest.mark.parametrize(("device", "column"), [("cpu", 2), ("gpu", 3)])
def test_the_table_of_alignment_is_the_record(device, column):
    cases, rows = record(device), [row for row in ROW.findall(README) if row[0] != "scheme"]
    assert len(rows) == 8
    for row in rows:
        scheme, learner = row[:2]
        case = cases.get(scheme if learner == "aligned" else f"{scheme} {learner}")
        if row[column].strip() == "-":
            assert case is None
            continue
        mean, largest = (float(number) for number in row[column].split(","))
        assert mean == pytest.approx(case["mismatch_delta_abs_mean"], rel=0.05), row
        assert largest == pytest.approx(case["mismatch_delta_abs_max"], rel=0.05), row


def test_the_same_table_stands_in_the_benchmarks():
    rows = ROW.findall((ROOT / "docs/benchmarks.md").read_text())
    assert set(ROW.findall(README)) <= set(rows)
