"""Numbers of the README against the records in benchmarks/results, and its size."""

from __future__ import annotations

import json
import math
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


def results(name: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def table(after: str) -> list[list[str]]:
    """Cells of the rows of the first table of docs/benchmarks.md behind a text, without its head."""
    behind = (ROOT / "docs/benchmarks.md").read_text().partition(after)[2]
    assert behind, after
    lines = [line for line in behind[behind.index("\n|") + 1 :].split("\n\n")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def numbers(cell: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"[\d,]*\.?\d+", cell)]


def test_the_table_of_experts_is_the_record() -> None:
    times: dict[tuple, dict[str, float]] = {}
    for row in results("experts_gpu")["rows"]:
        if "us" in row:
            times.setdefault((row["section"], row["m"], row["routing"]), {})[row["who"]] = row["us"]
    tokens = sorted({m for _, m, _ in times})
    for scheme, *cells in table("## Mixtures of experts"):
        if "," in scheme:
            continue
        ratios = {
            key[1:]: min(us for who, us in by.items() if who != "qarl") / by["qarl"]
            for key, by in times.items()
            if key[0] == scheme
        }
        for m, cell in zip(tokens, cells, strict=False):
            both = [ratio for (its, _), ratio in ratios.items() if its == m]
            assert numbers(cell) == [pytest.approx(geometric_mean(both), abs=0.006)], (scheme, m)
        mean, worst = numbers(cells[len(tokens)])
        assert mean == pytest.approx(geometric_mean(list(ratios.values())), abs=0.006)
        assert worst == pytest.approx(min(ratios.values()), abs=0.006)


def geometric_mean(values: list[float]) -> float:
    return math.prod(values) ** (1 / len(values))


def test_the_table_of_a_mixtures_learner_is_the_record() -> None:
    runs = [run for run in results("learner_gpu")["runs"] if "qwen3-30b-a3b" in run["command"]]
    found: dict[str, dict[str, float]] = {}
    for row in runs[-1]["records"]:
        found.setdefault(row.get("scheme", "Hugging"), {})[row["what"]] = row["tokens_per_s"]
    rows = table("A learner of four such layers")
    assert len(rows) == len(found) == 4
    for name, forward, both, ratio, _ in rows:
        own = found[name.removeprefix("qarl ").split()[0].rstrip(",")]
        assert numbers(forward) == [pytest.approx(own["forward"], abs=1)]
        assert numbers(both) == [pytest.approx(own["forward_backward"], abs=1)]
        assert numbers(ratio) == [
            pytest.approx(own["forward_backward"] / found["Hugging"]["forward_backward"], abs=0.006)
        ]


def test_the_steps_beside_trl_with_vllm_are_the_record() -> None:
    found = {}
    for run in results("step_trl_gpu")["runs"]:
        if run["revision"] == "431c03f" and "qwen3-1.7b" in run["command"]:
            exact = "exact" in run["command"]
            found |= {(row["part"], exact): row for row in run["records"] if row["what"] == "step"}
    rows = table("With vLLM 0.24 as the sampler of both")
    for cells, key in zip(rows, [("trl", False), ("step", False), ("step", True)], strict=True):
        names = ("step_s", "rollout_s", "learner_s", "publish_s")
        for name, cell in zip(names, cells[1:], strict=False):
            assert numbers(cell) == [pytest.approx(found[key][name], abs=0.051)], (key, name)
