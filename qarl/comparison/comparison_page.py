"""comparison.html and plots/*.png of a comparison of runs."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qarl.comparison.members import evaluation_avg
from qarl.comparison.summary import reasons, result_tables
from qarl.report.blocks import Bar, BarChart, Block, Column, Facts, LineChart, Section, Series, Table, Text
from qarl.report.formatting import MISSING, interval, number
from qarl.report.page import write_page
from qarl.storage.disk import disk_errors
from qarl.storage.runs import RunRecord

_MIB = 2**20
MAX_CURVES = 6  # per chart; more curves are split into one chart per learner


def write_outputs(out: Path, comparison: dict[str, Any], records: dict[str, RunRecord]) -> None:
    """Write out/comparison.html and its charts as out/plots/*.png, replacing those of an earlier page.

    Args:
        out: Output directory.
        comparison: Content of comparison.json.
        records: Member name -> run.

    Raises:
        UserError: A file cannot be written.
    """
    sections, subtitle = build_sections(comparison, records), _subtitle(comparison["members"])
    charts = write_page(out / "comparison.html", comparison["title"], subtitle, sections)
    with disk_errors(out / "plots", place="--out"):
        for path in (out / "plots").glob("*.png"):
            if path not in charts:
                path.unlink()


def build_sections(comparison: dict[str, Any], records: dict[str, RunRecord]) -> list[Section]:
    """Build the page: results, curves, evaluation, cost, differences, environment. Empty sections are omitted."""
    members, groups = comparison["members"], comparison["groups"]
    shown = groups or members
    sections = [
        Section("Results", _results(comparison)),
        Section("Reward and mismatch", _curves(members, groups, records)),
        Section("Curves of the study", _study_curves(comparison, members, groups, records)),
        Section("Evaluation", _evaluation(shown, members)),
        Section("Time, memory and size", _costs(shown)),
        Section("What differs", _differences(comparison)),
        Section("Environment", _environment(comparison)),
    ]
    return [section for section in sections if section.blocks]


def _subtitle(members: list[dict[str, Any]]) -> str:
    states = Counter(member["state"] for member in members)
    return f"{len(members)} runs: " + ", ".join(f"{count} {state}" for state, count in states.items())


def _results(comparison: dict[str, Any]) -> list[Block]:
    notices, why = ([Text(line, "warning") for line in lines] for lines in (comparison["notices"], reasons(comparison)))
    return [*notices, *result_tables(comparison), *why]


def _curves(members: list[dict[str, Any]], groups: list[dict[str, Any]], records: dict[str, RunRecord]) -> list[Block]:
    lines, note = _lines(members, groups, records)
    if not lines:
        return []
    by_learner: dict[str, dict[str, list[RunRecord]]] = {}
    for name, of in lines.items():
        by_learner.setdefault(of[0].config.quant.learner, {})[name] = of
    if len(lines) <= MAX_CURVES or len(by_learner) == 1:
        return _reward_and_mismatch("", lines, note)
    pairs = [_reward_and_mismatch(f", {learner}", of, note) for learner, of in by_learner.items()]
    # Consecutive charts share a row, so text comes last.
    return sorted((block for pair in pairs for block in pair), key=lambda block: isinstance(block, Text))


def _lines(
    members: list[dict[str, Any]], groups: list[dict[str, Any]], records: dict[str, RunRecord]
) -> tuple[dict[str, list[RunRecord]], str]:
    """Return curve name -> runs, and the note for curves over several seeds."""
    grouped = {g["name"] for g in groups}
    lines: dict[str, list[RunRecord]] = {}
    for member in members:
        record = records.get(member["name"])
        if record is not None and record.metrics:
            name = member["group"] if member["group"] in grouped else member["name"]
            lines.setdefault(name, []).append(record)
    return lines, "Mean over the seeds; the band is from the lowest to the highest." if groups else ""


def _study_curves(
    comparison: dict[str, Any],
    members: list[dict[str, Any]],
    groups: list[dict[str, Any]],
    records: dict[str, RunRecord],
) -> list[Block]:
    """Build the study's charts for the members that have the metric in some steps."""
    lines, note = _lines(members, groups, records)
    charts: list[Block] = []
    for curve in comparison["curves"]:
        every = [_series(name, of, curve["metric"]) for name, of in lines.items()]
        found = [measured(series) for series in every]
        found = [series for series in found if series.x]
        if found:
            charts.append(LineChart(curve["title"], "step", curve["unit"], found, curve["log_y"], note))
    return charts


def measured(series: Series) -> Series:
    """Drop the steps without a value, so that a metric measured every few steps is a connected curve."""
    kept = [i for i, y in enumerate(series.y) if y is not None]

    def pick(values: Sequence[float | None] | None) -> list[float | None] | None:
        return None if values is None else [values[i] for i in kept]

    x, y = [series.x[i] for i in kept], [series.y[i] for i in kept]
    return Series(series.name, x, y, pick(series.low), pick(series.high))


def _reward_and_mismatch(which: str, lines: dict[str, list[RunRecord]], note: str) -> list[Block]:
    """Return both charts; `which` is a suffix of the titles. A mismatch of 0 becomes a sentence."""
    rewards = [_series(name, of, "reward/mean") for name, of in lines.items()]
    reward = LineChart(f"Reward{which}", "step", "mean reward", rewards, note=note)
    every = [_series(name, of, "mismatch/delta_abs_mean") for name, of in lines.items()]
    curves = [series for series in every if any(y != 0 for y in series.y)]
    exact = [series.name for series in every if series not in curves]
    exact_note = f"The mismatch is 0 in every step of {', '.join(exact)}: sampler and learner agree bit for bit."
    if not curves:
        return [reward, Text(exact_note)]
    both = " ".join(text for text in (note, exact_note if exact else "") if text)
    return [reward, LineChart(f"Mismatch{which}", "step", "mean |Δ log-prob|, nats", curves, True, both)]


def _series(name: str, records: list[RunRecord], metric: str) -> Series:
    """Return the metric over the steps that all `records` have. Several runs give the mean, with a min-max band."""
    runs = [{r["step"]: r.get(metric) for r in record.metrics} for record in records]
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    if len(runs) == 1:
        return Series(name, steps, [runs[0][step] for step in steps])
    values = [[run[step] for run in runs] for step in steps]

    def over(fold: Callable[[list[float]], float]) -> list[float | None]:
        known = [[value for value in at if value is not None] for at in values]
        return [fold(those) if len(those) == len(runs) else None for those in known]

    return Series(name, steps, over(statistics.fmean), over(min), over(max))


def _evaluation(shown: list[dict[str, Any]], members: list[dict[str, Any]]) -> list[Block]:
    bars = []
    for entry in shown:
        avg = entry.get("evaluation_avg") or evaluation_avg(entry)
        if avg:
            bars.append(Bar(entry["name"], avg["mean"], avg.get("low"), avg.get("high")))
    if not bars:
        return []
    blocks: list[Block] = [BarChart("Evaluation", "overall avg@k of the last evaluation", bars)]
    evaluated = [m for m in members if m.get("evaluation")]
    tasks = list(dict.fromkeys(task["name"] for m in evaluated for task in m["evaluation"]["tasks"]))
    rows = []
    for m in evaluated:
        by_name = {task["name"]: task["avg"] for task in m["evaluation"]["tasks"]}
        cells = [_avg(by_name.get(task)) for task in tasks]
        rows.append([m["name"], number(m["evaluation"]["step"]), *cells, _avg(evaluation_avg(m))])
    heads = [Column("run"), Column("step", "right"), *(Column(task, "right") for task in tasks)]
    blocks.append(Table([*heads, Column("overall", "right")], rows, "avg@k by task, with 95 % intervals"))
    return blocks


def _avg(avg: dict[str, float] | None) -> str:
    return MISSING if avg is None else interval(avg["mean"], avg.get("low"), avg.get("high"))


def _costs(shown: list[dict[str, Any]]) -> list[Block]:
    charts = [
        ("Step time", "median seconds", "step_s", 1),
        ("Rollout time", "median seconds per step", "rollout_s", 1),
        ("Learner time", "median seconds per step", "learner_s", 1),
        ("Publish time", "median seconds per step", "publish_s", 1),
        ("Peak memory", "GiB", "memory_peak_gib", 1),
        ("Checkpoint size", "MiB of the low-bit export", "checkpoint_bytes", _MIB),
    ]
    built = (BarChart(title, unit, _bars(shown, key, scale)) for title, unit, key, scale in charts)
    return [chart for chart in built if chart.bars]


def _bars(shown: list[dict[str, Any]], key: str, scale: int) -> list[Bar]:
    bars = []
    for entry in shown:
        value = entry.get(key)
        if isinstance(value, dict):
            bars.append(Bar(entry["name"], value["mean"] / scale, value["low"] / scale, value["high"] / scale))
        elif value is not None:
            bars.append(Bar(entry["name"], value / scale))
    return bars


def _differences(comparison: dict[str, Any]) -> list[Block]:
    tables = (
        ("Configuration keys that differ between runs", comparison["configuration_differences"]),
        ("Inputs that differ between the runs that recorded them", comparison["input_differences"]),
        ("Environments that differ between runs", comparison["environment_differences"]),
    )
    return [_difference_table(caption, keys) for caption, keys in tables if keys]


def _difference_table(caption: str, keys: dict[str, dict[str, Any]]) -> Table:
    """Use the longer of keys and runs as rows."""
    names = list(dict.fromkeys(name for by in keys.values() for name in by))
    if len(keys) >= len(names):
        columns = [Column("key"), *map(Column, names)]
        return Table(columns, [[key, *(_value(by.get(name)) for name in names)] for key, by in keys.items()], caption)
    columns = [Column("run"), *map(Column, keys)]
    return Table(columns, [[name, *(_value(by.get(name)) for by in keys.values())] for name in names], caption)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _environment(comparison: dict[str, Any]) -> list[Block]:
    environment = comparison["environment"]
    if environment is None:
        return []
    packages = ", ".join(f"{name} {version}" for name, version in environment.get("packages", {}).items())
    facts = [(key, _value(value)) for key, value in environment.items() if key not in ("packages", "inputs")]
    blocks: list[Block] = [Facts([*facts, ("packages", packages), ("comparison", " ".join(comparison["command"]))])]
    if comparison["environment_differences"]:
        blocks.append(Text("Environment of the first run. Differences of other runs are listed above."))
    return blocks
