"""Reading run directories, without torch: one that is running, stopped, finished or damaged."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qarl.config import Config
from qarl.config.messages import fault_lines
from qarl.config.yaml_io import parse_yaml
from qarl.errors import UserError
from qarl.inputs.files import NoSuchFile, Unreadable, read_lines, read_text
from qarl.inputs.json import parse_json, read_json_object
from qarl.inputs.paths import path_errors
from qarl.inputs.schema import Record, Step
from qarl.storage.lock import open_lock_to_ask

NUMBER_LIMIT = 1e100  # no value of a run comes near it, and squares and sums of such values are finite
METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"


class Row(Record):
    """A line that belongs to a step."""

    step: Step


class Metrics(Row):
    """A line of metrics.jsonl: beside the step finite numbers and null.

    What is read of it has null for a number beyond NUMBER_LIMIT, and no text, which nothing draws.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | str | None] = Field(init=False)


Number = Annotated[float, Field(ge=-NUMBER_LIMIT, le=NUMBER_LIMIT)]


class _Interval(Record):
    mean: Number | None
    low: Number | None = None
    high: Number | None = None


class _Scores(Record):
    avg: _Interval | None = None
    passes: dict[str, _Interval] = Field({}, alias="pass")


class _TaskScores(_Scores):
    name: str


class Evaluation(Row):
    """A line of evaluations.jsonl. task_fingerprints: task -> SHA-256 of its prompts, answers and rewards."""

    tasks: list[_TaskScores] = Field([])
    overall: _Scores | None = None
    task_fingerprints: dict[str, str] = Field({})


State = Literal["running", "finished", "stopped", "empty"]


@dataclass(frozen=True)
class RunRecord:
    """One run as its directory tells it.

    environment: environment.json, empty if it is missing or damaged. metrics, evaluations: one dict per line, oldest
    first. state: `running`, its lock is held; `finished`, all of `train.steps` are done; `empty`, no step is; else
    `stopped`. step: the last one in the metrics, 0 if there is none. damaged: file name -> lines that are no record.
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
    with path_errors(str(path), "give a run directory that can be read"):
        if not path.is_dir():
            raise UserError(f"{path}: {'is a file' if path.exists() else 'no such directory'}; give a run directory")
        if not (path / "config.yaml").exists():
            raise UserError(f"{path}: not a run directory (it holds no config.yaml); give one that `qarl train` wrote")
    config = read_run_config(path)
    metrics, damaged_metrics = read_records(path / METRICS, Metrics)
    evaluations, damaged_evaluations = read_records(path / EVALUATIONS, Evaluation)
    damaged = {METRICS: damaged_metrics, EVALUATIONS: damaged_evaluations}
    step = metrics[-1]["step"] if metrics else 0
    state: State
    if _locked(path / ".lock"):
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
    """The runs at and below `root` by path, and one line for each directory that looks like a run and cannot be read.

    Hidden directories and links are not followed. Raises UserError if `root` is no directory.
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
    """The resolved configuration of a run directory. Raises UserError if it cannot be read or is no configuration."""
    file = run_dir / "config.yaml"
    try:
        data = parse_yaml(read_text(file), str(file))
    except Unreadable as error:
        raise UserError(f"{error}; restore it, or give another run") from error
    if not isinstance(data, dict):
        raise UserError(f"{file}: holds no configuration; restore it, or give another run")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise UserError("\n".join(fault_lines(error, Config, data, lambda loc: str(file)))) from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, oldest first; a line that a kill cut short is left out. Missing file: empty."""
    return read_records(path, Metrics)[0]


def read_records(path: Path, model: type[BaseModel] = Row) -> tuple[list[dict[str, Any]], int]:
    """The lines of `path` that are JSON objects as `model` wants them, and how many others there are.

    Missing file: none. Raises UserError if it cannot be read.
    """
    rows = map_lines(path, lambda line: parse_record(line, model))
    records = [row for row in rows if row is not None]
    return records, len(rows) - len(records)


def record_steps(path: Path) -> list[int | None]:
    """The step of each line of a metrics.jsonl, None of one that is no record; otherwise as `read_records`."""
    return map_lines(path, lambda line: None if (row := parse_record(line, Metrics)) is None else row["step"])


def parse_record(line: bytes, model: type[BaseModel] = Row) -> dict[str, Any] | None:
    """The record of one line, None if the line is cut short or is no such record."""
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
    """`parse` of each line; nothing where there is no such file."""
    try:
        return [parse(line) for _, line in read_lines(path)]
    except NoSuchFile:
        return []


def _environment(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except Unreadable:
        return {}


def _locked(path: Path) -> bool:
    """Whether a process holds the run. Asking takes the lock for an instant, shared, and never waits."""
    fd = open_lock_to_ask(path)
    if fd is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
