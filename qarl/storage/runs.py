"""Reading run directories, without torch: one that is running, stopped, finished or damaged."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from qarl.config import Config
from qarl.config.messages import fault_lines
from qarl.config.yaml_io import parse_yaml
from qarl.errors import UserError

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"


@dataclass(frozen=True)
class RunRecord:
    """One run as its directory tells it.

    environment: environment.json, empty if it is missing or damaged. metrics, evaluations: one dict a line, oldest
    first. state: `running`, its lock is held; `finished`, all of `train.steps` are done; `empty`, no step is; else
    `stopped`. step: the last one in the metrics, 0 if there is none. damaged: file name -> lines that are no record.
    """

    path: Path
    config: Config
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    state: Literal["running", "finished", "stopped", "empty"]
    step: int
    damaged: dict[str, int] = field(default_factory=dict)


def read_run(path: Path) -> RunRecord:
    """Read one run. Raises UserError if `path` is no run directory or its configuration cannot be read."""
    if not path.is_dir():
        raise UserError(f"{path}: {'is a file' if path.exists() else 'no such directory'}; give a run directory")
    if not (path / "config.yaml").exists():
        raise UserError(f"{path}: not a run directory (it holds no config.yaml); give one that `qarl train` wrote")
    config = read_run_config(path)
    metrics, damaged_metrics = read_records(path / METRICS)
    evaluations, damaged_evaluations = read_records(path / EVALUATIONS)
    damaged = {METRICS: damaged_metrics, EVALUATIONS: damaged_evaluations}
    step = metrics[-1]["step"] if metrics else 0
    if _locked(path / ".lock"):
        state = "running"
    elif step >= config.train.steps:
        state = "finished"
    else:
        state = "stopped" if metrics else "empty"
    return RunRecord(
        path, config, _environment(path / "environment.json"), metrics, evaluations, state, step,
        {name: lines for name, lines in damaged.items() if lines},
    )  # fmt: skip


def find_runs(root: Path) -> tuple[list[RunRecord], list[str]]:
    """The runs at and below `root` by path, and one line for each directory that looks like a run and cannot be read.

    Hidden directories and links are not followed. Raises UserError if `root` is no directory.
    """
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
        data = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error}); restore it, or give another run") from error
    if not isinstance(data, dict):
        raise UserError(f"{file}: holds no configuration; restore it, or give another run")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise UserError("\n".join(fault_lines(error, Config, data, lambda loc: str(file)))) from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, oldest first; a line that a kill cut short is left out. Missing file: empty."""
    return read_records(path)[0]


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of `path` that are JSON objects with an integer `step`, and how many others there are.

    Missing file: none. Raises UserError if it cannot be read.
    """
    if not path.exists():
        return [], 0
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; make it readable, or give another run") from error
    records = [record for line in lines if (record := parse_record(line)) is not None]
    return records, len(lines) - len(records)


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record of one line, None if the line is cut short or is no such record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _environment(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _locked(path: Path) -> bool:
    """Whether a process holds the run. Asking takes the lock for an instant, shared, and never waits."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
