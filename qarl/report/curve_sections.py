"""The sections of a run's page that show its metrics as curves."""

import statistics
from collections.abc import Iterable
from typing import Any

from qarl.report.blocks import Bar, BarChart, Block, LineChart, Section, Series, Text
from qarl.report.curves import ELSEWHERE, GROUPS, Curves


def names_of(records: list[dict[str, Any]]) -> list[str]:
    """Return the metrics in order of first appearance."""
    return list(dict.fromkeys(name for record in records for name in record))


def values_of(records: list[dict[str, Any]], name: str) -> list[float | None]:
    """Return one value per record; None if it is missing, null or not a number."""
    values = (record.get(name) for record in records)
    return [v if isinstance(v, (int, float)) and not isinstance(v, bool) else None for v in values]


def curve_sections(metrics: list[dict[str, Any]]) -> tuple[list[Section], list[tuple[str, float]]]:
    """Return a section per group of curves, and (metric, value) of the metrics that never changed."""
    sections: list[Section] = []
    constant: list[tuple[str, float]] = []
    for title, group in GROUPS.items():
        charts, still = _charts(group, metrics)
        constant += still
        blocks: list[Block] = [*charts]
        if title == "Reward and responses" and "reward/mean" in names_of(metrics):
            blocks.insert(0, _reward(metrics))
        if dict(still).get("mismatch/delta_abs_max") == 0:
            agreed = f"Sampler and learner agreed bit for bit in all {len(metrics)} steps: |delta| was 0."
            blocks.insert(0, Text(agreed))
        if title == "Cost" and len(metrics) > 1:
            blocks += _phases(metrics)
        sections.append(Section(title, blocks))
    return sections, constant


def other_charts(records: list[dict[str, Any]], known: set[str]) -> list[LineChart]:
    """Return a chart for each numeric metric that is in no group and not in `known`."""
    names = names_of(records)
    known = (
        known
        | set(ELSEWHERE)
        | {name for group in GROUPS.values() for curves in group for name in curves.labels(names)}
    )
    steps = [record["step"] for record in records]
    return [
        LineChart(name, "step", "as logged", [Series(name, steps, values_of(records, name))])
        for name in names
        if name not in known and not all(isinstance(record.get(name), str) for record in records)
    ]


def _charts(group: Iterable[Curves], records: list[dict[str, Any]]) -> tuple[list[LineChart], list[tuple[str, float]]]:
    """Return the charts of a group that the run has metrics for, and (metric, value) of constant metrics.

    A chart whose curves are all constant over three or more steps is replaced by rows of a table. Steps without any
    metric of a chart, because it is measured only occasionally, are not gaps.
    """
    names = names_of(records)
    charts: list[LineChart] = []
    constant: list[tuple[str, float]] = []
    for curves in group:
        found = curves.labels(names)
        rows = [record for record in records if any(name in record for name in found)]
        values = {name: values_of(rows, name) for name in found}
        single = {name: set(column) for name, column in values.items()}
        if len(rows) > 2 and all(len(s) == 1 and None not in s for s in single.values()):
            constant += [(name, value) for name, s in single.items() for value in s if value is not None]
        elif found:
            steps = [record["step"] for record in rows]
            series = [Series(label, steps, values[name]) for name, label in found.items()]
            # An estimate such as chi-squared can be negative, which a log axis would omit.
            log_y = curves.log_y and not any(v < 0 for column in values.values() for v in column if v is not None)
            charts.append(LineChart(curves.title, "step", curves.unit, series, log_y, curves.note))
    return charts, constant


def _reward(metrics: list[dict[str, Any]]) -> LineChart:
    steps = [row["step"] for row in metrics]
    mean, std = values_of(metrics, "reward/mean"), values_of(metrics, "reward/std")
    pairs = list(zip(mean, std, strict=True))
    low = [None if m is None or s is None else m - s for m, s in pairs]
    high = [None if m is None or s is None else m + s for m, s in pairs]
    series = [Series("mean of the step", steps, mean, low, high)]
    window = min(50, len(metrics) // 10)
    note = "Band: one standard deviation over the step's responses."
    if window > 1:
        series.append(Series(f"mean of the last {window} steps", steps, _trailing(mean, window)))
    return LineChart("Reward", "step", "mean reward per response", series, note=note)


def _trailing(values: list[float | None], window: int) -> list[float | None]:
    """Return the mean over the last `window` values, ignoring missing ones; None for the first steps."""
    parts = [[v for v in values[max(0, i + 1 - window) : i + 1] if v is not None] for i in range(len(values))]
    return [statistics.fmean(part) if part and i + 1 >= window else None for i, part in enumerate(parts)]


def _phases(metrics: list[dict[str, Any]]) -> list[Block]:
    """Return the median time per phase, without the first step, which includes warm-up."""
    bars = []
    for name in names_of(metrics):
        values = [v for v in values_of(metrics[1:], name) if v is not None]
        if name.startswith("time/") and values:
            bars.append(Bar(name.removeprefix("time/").removesuffix("_s"), statistics.median(values)))
    return [BarChart("Step time", "seconds, median after the first step", bars)] if bars else []
