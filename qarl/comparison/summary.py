"""comparison.json and the table of a comparison of runs, for both console and page."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from rich.text import Text

from qarl.comparison.inputs import input_differences, notices
from qarl.comparison.members import COLUMN, entry_of, evaluation_avg, grouped
from qarl.comparison.plan import Member
from qarl.comparison.study import Study, StudyColumn
from qarl.config.yaml_io import parse_yaml
from qarl.inputs.json import flatten
from qarl.report.blocks import Column, Table
from qarl.report.formatting import MISSING, bytes_, gib, interval, number, seconds
from qarl.storage.runs import RunRecord
from qarl.terminal.console import Console, print_table
from qarl.utils.text import visible

FORMAT_VERSION = 1
# Keys of environment.json that do not affect a run's numbers.
_NOT_COMPARED = ("command", "host", "seed")


class Number(NamedTuple):
    """A column: its head, its key in comparison.json, its format, and its meaning."""

    head: str
    key: str
    write: Callable[[float | None], str]
    help: str


NUMBERS = (  # most important first
    Number("reward, last quarter", "reward_last_quarter", number, "mean over the last quarter of the steps"),
    Number("evaluation avg", "evaluation_avg", number, "overall avg@k of the last evaluation, with its 95 % interval"),
    Number("mismatch mean", "mismatch_delta_abs_mean", number, "mean |learner - sampler log-prob|, all steps"),
    Number("step", "step_s", seconds, "median seconds per step, without the first"),
    Number("checkpoint", "checkpoint_bytes", bytes_, "bytes of the low-bit export, computed from its tensors"),
    Number("peak memory", "memory_peak_gib", gib, "training process; on a GPU, memory allocated by torch"),
    Number("mismatch max", "mismatch_delta_abs_max", number, "largest |learner - sampler log-prob|, all steps"),
    Number("rollout", "rollout_s", seconds, "median seconds per rollout"),
    Number("learner", "learner_s", seconds, "median seconds per update"),
    Number("publish", "publish_s", seconds, "median seconds per publish"),
    Number("reward, first quarter", "reward_first_quarter", number, "mean over the first quarter of the steps"),
    Number("rollout tokens/s", "rollout_tokens_per_s", number, "median tokens sampled per second of rollout"),
)


def build(
    title: str, command: list[str], members: list[Member], records: Mapping[str, RunRecord], study: Study | None = None
) -> dict[str, Any]:
    """Return the content of comparison.json.

    Args:
        title: Title of the page.
        command: Arguments of the process.
        members: Members of the comparison.
        records: Member name -> run, for members that have a run directory.
        study: The study that the members are variants of.
    """
    columns, curves = (study.columns, study.curves) if study else ([], [])
    entries = [entry_of(member, records.get(member.name), columns) for member in members]
    inputs = input_differences({name: record for name, record in records.items() if record.metrics})
    environments = {
        member.name: {k: v for k, v in records[member.name].environment.items() if k not in _NOT_COMPARED}
        for member in members
        if member.name in records and records[member.name].environment
    }
    flat = {name: flatten({k: v for k, v in each.items() if k != "inputs"}) for name, each in environments.items()}
    return {
        "format_version": FORMAT_VERSION,
        "kind": "runs",
        "title": title,
        "command": command,
        # The first member's environment is stored in full, and those of the others as differences.
        "environment": next(iter(environments.values()), None),
        "environment_differences": differing(flat),
        "input_differences": inputs,
        "notices": notices(records, inputs),
        "members": entries,
        "groups": grouped(entries) if _seeds_apart(members, inputs) else [],
        "configuration_differences": differing(configurations(members)),
        "columns": [column.model_dump() for column in columns],
        "curves": [curve.model_dump() for curve in curves],
    }


def _seeds_apart(members: list[Member], inputs: dict[str, dict[str, Any]]) -> bool:
    """Return whether members of the same group differ only in their seed, given `input_differences`."""
    kinds: dict[str, list[Member]] = {}
    for member in members:
        kinds.setdefault(member.group, []).append(member)
    return all(
        len({member.seed for member in kind}) == len(kind)
        and set(differing(configurations(kind))) <= {"train.seed"}
        and all(len({str(by[m.name]) for m in kind if m.name in by}) <= 1 for by in inputs.values())
        for kind in kinds.values()
    )


def configurations(members: list[Member]) -> dict[str, dict[str, Any]]:
    """Return member -> configuration with dotted keys, without the run directory, which always differs."""
    return {
        member.name: {
            key: value
            for key, value in flatten(parse_yaml(member.config.to_yaml(), member.name)).items()
            if key != "train.run_dir"
        }
        for member in members
        if member.config is not None
    }


def differing(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return key -> member -> value for keys whose values differ between members; None for a missing key."""
    keys = dict.fromkeys(key for member in values.values() for key in member)
    return {
        key: {name: member.get(key) for name, member in values.items()}
        for key in keys
        if len({json.dumps(member.get(key), sort_keys=True) for member in values.values()}) > 1
    }


def cell(entry: dict[str, Any], column: Number) -> str:
    """Format a number of a member or group; a group's with its bounds."""
    value = evaluation_avg(entry) if column.key == "evaluation_avg" and "evaluation" in entry else entry.get(column.key)
    if isinstance(value, dict):
        mean, low, high = value["mean"], value.get("low"), value.get("high")
        if column.write is number:
            return interval(mean, low, high)
        bounds = "" if low is None or high is None else f" [{column.write(low)}, {column.write(high)}]"
        return f"{column.write(mean)}{bounds}"
    return column.write(value)


def result_tables(comparison: dict[str, Any]) -> list[Table]:
    """Return the table of groups, if there are any, and the table of members, for both console and page.

    A table has the columns in which any of its entries has a number; a study's columns come first.
    """
    members, groups = comparison["members"], comparison["groups"]
    tables = []
    if groups:
        heads = [Column("group"), Column("seeds", "right"), Column("interval")]
        first = [[g["name"], str(len(g["seeds"])), g["interval"]] for g in groups]
        note = "Means over the seeds, with a 95 % t-interval (t95), or the range for fewer than three (min-max)."
        tables.append(_table(comparison, heads, first, groups, "Seeds together", note))
    heads = [Column("run"), Column("state"), Column("steps", "right")]
    first = [[m["name"], m["state"], number(m.get("steps"))] for m in members]
    return [*tables, _table(comparison, heads, first, members, "Runs", "")]


def _table(
    comparison: dict[str, Any],
    heads: list[Column],
    first: list[list[str]],
    entries: list[dict[str, Any]],
    caption: str,
    note: str,
) -> Table:
    own = [_study_number(StudyColumn(**column)) for column in comparison["columns"]]
    used = [column for column in (*own, *NUMBERS) if any(cell(entry, column) != MISSING for entry in entries)]
    return Table(
        [*heads, *(Column(column.head, "right", column.help) for column in used)],
        [[*cells, *(cell(entry, column) for column in used)] for cells, entry in zip(first, entries, strict=True)],
        caption,
        note,
    )


def reasons(comparison: dict[str, Any]) -> list[str]:
    """Return a line per member whose state needs an explanation."""
    return [f"{m['name']}: {m['state']}: {m['reason']}" for m in comparison["members"] if m["reason"]]


def _study_number(column: StudyColumn) -> Number:
    def write(value: float | None) -> str:
        passed = None if value is None else column.passes(value)
        return number(value) if passed is None else "yes" if passed else "no"

    return Number(column.head, f"{COLUMN}{column.head}", write, column.help or f"{column.metric}, {column.over}")


def print_results(comparison: dict[str, Any], console: Console | None = None) -> None:
    """Print the tables of members and groups, and one line per notice and reason."""
    console = console or Console()
    for table in reversed(result_tables(comparison)):
        print_table(replace(table, caption=""), console, stacked=True)
    for line in (*comparison["notices"], *reasons(comparison)):
        console.print(Text(visible(line)), soft_wrap=True)
