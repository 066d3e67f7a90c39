"""Numbers in README.md and benchmarks/*.md against the records in benchmarks/results."""

import json
import re
from statistics import geometric_mean

import pytest
from pages import ROOT

README = (ROOT / "README.md").read_text()
PROSE = " ".join(README.split())
SPEED = (ROOT / "benchmarks/speed.md").read_text()
SECONDS = ("step_s", "rollout_s", "learner_s", "publish_s")
ROW = re.compile(r"^\| (\w+) \| (\w+)[^|]*\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def record(device: str) -> dict[str, dict[str, float]]:
    return json.loads((ROOT / f"benchmarks/results/schemes_{device}.json").read_text())["cases"]


def test_the_readme_is_short():
    assert len(README.encode()) <= 10_000


@pytest.mark.parametrize(("device", "column"), [("cpu", 2), ("gpu", 3)])
def test_the_table_of_alignment_is_the_record(device, column):
    section = SPEED.partition("## What alignment buys")[2].partition("\n## ")[0]
    cases, rows = record(device), [row for row in ROW.findall(section) if row[0] != "scheme"]
    assert len(rows) == 8
    for row in rows:
        scheme, learner = row[:2]
        case = cases.get(scheme if learner == "aligned" else f"{scheme} {learner}")
        mean, largest = (float(number) for number in row[column].split(","))
        assert mean == pytest.approx(case["mismatch_delta_abs_mean"], rel=0.05), row
        assert largest == pytest.approx(case["mismatch_delta_abs_max"], rel=0.05), row


def test_the_numbers_of_the_readme_are_the_records() -> None:
    off = record("gpu")["w4a16 full_precision"]
    mean, largest = off["mismatch_delta_abs_mean"], off["mismatch_delta_abs_max"]
    assert f"off by {mean:.1f} nats per token on average and by {largest:.1f} at most" in PROSE
    steps = {}
    for run in results("step_trl_gpu")["runs"]:
        rows = {row["part"]: row["step_s"] for row in run["records"] if row["what"] == "step"}
        if {"trl", "step"} <= rows.keys():
            steps[run["revision"]] = rows
    last = steps["65cb48c"]
    assert f"{last['step']:.1f} s in W4A16 and {last['trl']:.1f} s in bf16" in PROSE
    ratios = {revision: f"{rows['trl'] / rows['step']:.1f}" for revision, rows in steps.items()}
    assert f"**{ratios['65cb48c']} times as fast as TRL**" in PROSE
    assert f"gave {ratios['667a612']} and {ratios['431c03f']}" in PROSE


def test_the_numbers_of_the_readmes_picture_are_the_records() -> None:
    """Bars are rectangles; the longest of each chart is 220 units wide."""
    picture = (ROOT / "docs/images/overview.svg").read_text()
    (run,) = (run for run in results("step_trl_gpu")["runs"] if run["revision"] == "65cb48c")
    steps = {row["part"]: row["step_s"] for row in run["records"] if row["what"] == "step"}
    mismatch = record("gpu")["w4a16 full_precision"]["mismatch_delta_abs_mean"]
    for value, unit, longest in ((mismatch, "nats", mismatch), *((s, "s", steps["trl"]) for s in steps.values())):
        assert f">{value:.3g} {unit}<" in picture and f'width="{220 * value / longest:.1f}"' in picture
    assert record("gpu")["w4a16"]["mismatch_delta_abs_mean"] == 0 and ">0 nats<" in picture


def results(name: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def between(page: str, start: str, end: str = "\0") -> str:
    """Return the text of a page of benchmarks/ from `start` to `end`, or to its end."""
    behind = (ROOT / f"benchmarks/{page}.md").read_text().partition(start)[2]
    assert behind, start
    return behind.partition(end)[0]


def table(after: str, page: str = "speed") -> list[list[str]]:
    """Return the cells of the rows, without the head, of the first table of a page after a text."""
    behind = between(page, after)
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
        own = {key[1:]: by for key, by in times.items() if key[0] == scheme}
        ratios = {key: min(us for who, us in by.items() if who != "qarl") / by["qarl"] for key, by in own.items()}
        for m, cell in zip(tokens, cells, strict=False):
            both = [ratio for (its, _), ratio in ratios.items() if its == m]
            assert numbers(cell) == [pytest.approx(geometric_mean(both), abs=0.006)], (scheme, m)
        mean, worst = numbers(cells[len(tokens)])
        assert mean == pytest.approx(geometric_mean(list(ratios.values())), abs=0.006)
        assert worst == pytest.approx(min(ratios.values()), abs=0.006)


def test_the_steps_beside_trl_with_vllm_are_the_record() -> None:
    found = {}
    for run in results("step_trl_gpu")["runs"]:
        if run["revision"] == "431c03f" and "qwen3-1.7b" in run["command"]:
            exact = "exact" in run["command"]
            found |= {(row["part"], exact): row for row in run["records"] if row["what"] == "step"}
    rows = table("With vLLM 0.24 as the sampler of both")
    for cells, key in zip(rows, [("trl", False), ("step", False), ("step", True)], strict=True):
        for name, cell in zip(SECONDS, cells[1:], strict=False):
            assert numbers(cell) == [pytest.approx(found[key][name], abs=0.051)], (key, name)


def test_the_speeds_of_exact_numerics_in_vllm_are_the_record() -> None:
    found = {}
    for run in results("vllm_exact_gpu")["runs"]:
        found |= {(r["scheme"], r["kernels"], r["batch"]): r for r in run["records"] if r["what"] == "generate"}
    rows = table("`VLLM_BATCH_INVARIANT=1`, and exact.", "vllm")
    assert len(rows) == 9
    for scheme, batch, own, exact, ratio, first, later in rows:
        records = [found[scheme, kernels, int(batch)] for kernels in ("vllm", "exact")]
        rates = [record["tokens_per_s"] for record in records]
        assert numbers(own) + numbers(exact) == [pytest.approx(rate, abs=1) for rate in rates]
        assert numbers(ratio) == [pytest.approx(rates[1] / rates[0], abs=0.006)]
        assert numbers(first) == [pytest.approx(record["first_token_s"], abs=0.0006) for record in records]
        assert numbers(later) == [pytest.approx(1000 * record["later_token_s"], abs=0.06) for record in records]


def test_the_table_of_exact_tokens_is_the_record() -> None:
    found = {(row["scheme"], row["engine"], row["tokens"]): row["differing"] for row in results("exact_gpu")["found"]}
    text = between("vllm", "Seen on an H200 with SmolLM2")
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert len(rows) == 12
    assert all(found[scheme, engine, int(tokens.replace(",", ""))] == 0 for scheme, engine, tokens in rows)
