"""Reading run directories, whether running, stopped, finished or damaged. Imports no torch."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qarl.config import Config
from qarl.config.messages import validated
from qarl.config.yaml_io import parse_yaml
from qarl.errors import UserError
from qarl.inputs.files import NoSuchFile, Unreadable, read_lines, read_text
from qarl.inputs.json import parse_json, read_json_object
from qarl.inputs.paths import path_errors
from qarl.inputs.schema import NUMBER_LIMIT, Number, Record, Step
from qarl.storage.lock import is_locked

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"


class Row(Record):
    """A line that belongs to a step."""

    step: Step


class Metrics(Row):
    """A line of metrics.jsonl: the step, and metrics that are finite numbers or null.

    On reading, numbers beyond NUMBER_LIMIT become null, and strings are dropped because nothing plots them.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | str | None] = Field(init=False)


class Interval(Record):
    mean: Number | None
    low: Number | None = None
    high: Number | None = None


class _Scores(Record):
    avg: Interval | None = None
    passes: dict[str, Interval] = Field({}, alias="pass")


class TaskScores(_Scores):
    name: str


class Evaluation(Row):
    """A line of evaluations.jsonl. task_fingerprints: task -> SHA-256 of its prompts, answers and rewards."""

    tasks: list[TaskScores] = Field([])
    overall: _Scores | None = None
    task_fingerprints: dict[str, str] = Field({})
    held_out: dict[str, float] = Field({})


State = Literal["running", "finished", "stopped", "empty"]


@dataclass(frozen=True)
class RunRecord:
    """One run, read from its directory.

    Attributes:
        environment: Content of environment.json; empty if it is missing or damaged.
        metrics, evaluations: One dict per line, oldest first.
        state: `running` if its lock is held, `finished` if all `train.steps` are done, `empty` if no step is done,
            otherwise `stopped`.
        step: Last step in the metrics; 0 if there is none.
        damaged: File name to number of lines that are not valid records.
    """

    path: Path
    config: Config
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    state: State
    step: int
    damaged: dict[str, int] = field(default_factory=dict)


def read_run(path: Path) -> RunRecord:
    """Read one run. Raises UserError if `path` is no run directory or its configuration cannot be read."""
    config = read_run_config(path)
    metrics, damaged_metrics = read_records(path / METRICS, Metrics)
    evaluations, damaged_evaluations = read_records(path / EVALUATIONS, Evaluation)
    damaged = {METRICS: damaged_metrics, EVALUATIONS: damaged_evaluations}
    step = metrics[-1]["step"] if metrics else 0
    state: State
    if is_locked(path):
        state = "running"
    elif step >= config.train.steps:
        state = "finished"
    else:
        state = "stopped" if metrics else "empty"
    return RunRecord(
        path,
        config,
        _environment(path / "environment.json"),
        metrics,
        evaluations,
        state,
        step,
        {name: lines for name, lines in damaged.items() if lines},
    )


def find_runs(root: Path) -> tuple[list[RunRecord], list[str]]:
    """Return the runs at and below `root` by path, and one line for each run directory that cannot be read.

    Hidden directories and links are not followed. Raises UserError if `root` is not a directory.
    """
    with path_errors(str(root)):
        if not root.is_dir():
            raise UserError(f"{root}: no such directory; give the one your runs are in")
    records: list[RunRecord] = []
    problems: list[str] = []
    for directory, folders, files in os.walk(root):
        if ("config.yaml" in files and {"environment.json", METRICS} & set(files)) or {METRICS, ".lock"} <= set(files):
            folders.clear()
            try:
                records.append(read_run(Path(directory)))
            except UserError as error:
                problems.append(str(error).splitlines()[0])
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
    return records, problems


def read_run_config(run_dir: Path) -> Config:
    """Return the resolved configuration of a run directory. Raises UserError if it cannot be read or is invalid."""
    file = run_dir / "config.yaml"
    with path_errors(str(run_dir), "give a run directory that can be read"):
        if not run_dir.is_dir():
            fault = "is a file" if run_dir.exists() else "no such directory"
            raise UserError(f"{run_dir}: {fault}; give a run directory")
        if not file.exists():
            fault = "not a run directory (it holds no config.yaml)"
            raise UserError(f"{run_dir}: {fault}; give one that `qarl train` wrote")
    try:
        data = parse_yaml(read_text(file), str(file))
    except Unreadable as error:
        raise UserError(f"{error}; restore it, or give another run") from error
    if not isinstance(data, dict):
        raise UserError(f"{file}: holds no configuration; restore it, or give another run")
    return validated(Config, data, lambda loc: str(file))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, oldest first, without truncated lines. Empty if there is no file."""
    return read_records(path, Metrics)[0]


def read_records(path: Path, model: type[BaseModel] = Row) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of `path` that are valid records of `model`, and the number of other lines.

    A missing file has no lines. Raises UserError if it cannot be read.
    """
    rows = map_lines(path, lambda line: parse_record(line, model))
    records = [row for row in rows if row is not None]
    return records, len(rows) - len(records)


def record_steps(path: Path) -> list[int | None]:
    """Return the step of each line of a metrics.jsonl, None for an invalid line; otherwise like `read_records`."""
    return map_lines(path, lambda line: None if (row := parse_record(line, Metrics)) is None else row["step"])


def parse_record(line: bytes, model: type[BaseModel] = Row) -> dict[str, Any] | None:
    """Parse one line; None if it is truncated or not a valid record."""
    try:
        record = parse_json(line, "", surrogates=True)
        model.model_validate(record)
    except (Unreadable, ValidationError):
        return None
    return _numbers(record) if model is Metrics else record


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    fit = {name: value for name, value in record.items() if not isinstance(value, str)}
    return {name: None if value is not None and abs(value) > NUMBER_LIMIT else value for name, value in fit.items()}


def map_lines(path: Path, parse: Callable[[bytes], Any]) -> list[Any]:
    """Apply `parse` to each line; returns an empty list if there is no such file."""
    try:
        return [parse(line) for _, line in read_lines(path)]
    except NoSuchFile:
        return []


def _environment(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except Unreadable:
        return {}
