"""Evaluations during training: curves with intervals, and a table."""

from typing import Any

from qarl.report.blocks import Block, Column, LineChart, Section, Series, Table
from qarl.report.formatting import interval

TABLE_ROWS = 16


def evaluation_section(evaluations: list[dict[str, Any]]) -> Section:
    """Build the section; empty without evaluations.

    Args:
        evaluations: Valid records of evaluations.jsonl; see `qarl.storage.runs.Evaluation`.
    """
    if not evaluations:
        return Section("Evaluation", [])
    held_out = _held_out(evaluations)
    if not any(_tasks(record) for record in evaluations):
        return Section("Evaluation", held_out)
    scores: dict[str, dict[str, list[tuple[int, dict[str, Any]]]]] = {}  # measure -> task -> (step, interval)
    for record in evaluations:
        for task, results in _tasks(record):
            for measure, value in _measures(results):
                scores.setdefault(measure, {}).setdefault(task, []).append((record["step"], value))
    blocks: list[Block] = held_out + [
        LineChart(
            f"Evaluation, {measure}",
            "step",
            "fraction of correct answers",
            [_series(task, points) for task, points in tasks.items()],
            note="Bars or bands: confidence intervals.",
        )
        for measure, tasks in scores.items()
    ]
    cells = {
        (step, task, measure): interval(*(value.get(key) for key in ("mean", "low", "high")))
        for measure, tasks in scores.items()
        for task, points in tasks.items()
        for step, value in points
    }
    rows = list(dict.fromkeys((step, task) for step, task, _ in cells))
    rows.sort(key=lambda row: -row[0])
    left_out = f"The latest {TABLE_ROWS} of {len(rows)} rows." if len(rows) > TABLE_ROWS else ""
    columns = [Column("step", "right"), Column("task"), *(Column(measure, "right") for measure in scores)]
    table = [[str(s), task, *(cells.get((s, task, m), "") for m in scores)] for s, task in rows[:TABLE_ROWS]]
    blocks.append(Table(columns, table, note=f"Mean and confidence interval. {left_out}".strip()))
    return Section("Evaluation", blocks)


HELD_OUT = {"loss": "nats per token", "divergence": "nats per token", "top1_agreement": "fraction of tokens"}


def _held_out(evaluations: list[dict[str, Any]]) -> list[Block]:
    """Return one chart per measure of `evaluation.held_out`."""
    rows = [(record["step"], record.get("held_out", {})) for record in evaluations]
    blocks: list[Block] = []
    for name, unit in HELD_OUT.items():
        points = [(step, found[name]) for step, found in rows if name in found]
        if points:
            series = Series(name, [step for step, _ in points], [value for _, value in points])
            blocks.append(LineChart(f"Held-out examples, {name.replace('_', ' ')}", "step", unit, [series]))
    return blocks


def _tasks(record: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    named = [(task["name"], task) for task in record.get("tasks", [])]
    overall = record.get("overall")
    return [*named, ("overall", overall)] if overall and len(named) != 1 else named


def _measures(results: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (`avg`, interval) and (`pass@k`, interval) for each k; pass@1 equals avg."""
    passes = [(f"pass@{k}", value) for k, value in results.get("pass", {}).items() if k != "1"]
    return [("avg", results["avg"]), *passes] if results.get("avg") else passes


def _series(task: str, points: list[tuple[int, dict[str, Any]]]) -> Series:
    mean, low, high = ([value.get(key) for _, value in points] for key in ("mean", "low", "high"))
    return Series(task, [step for step, _ in points], mean, low, high)
