"""Checks of a configuration against the machine: paths, files, rows of task generators. Loads no data."""

import importlib.util
import os
import re
import stat
import string
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from qarl.config.config import Config
from qarl.config.data import LOCAL_SUFFIXES, DataConfig
from qarl.config.deepspeed import deepspeed_keys, key_faults
from qarl.config.messages import Loc
from qarl.config.reward import RewardFunction
from qarl.data.tasks import generate
from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.inputs.paths import path_fault, reason_of
from qarl.inputs.section import Fault
from qarl.objectives.custom import Custom

Kind = Literal["file", "directory", "other", "missing"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_LOOKED_AT = 20_000  # entries of a data directory; beyond them, loading reports a directory without data


class Unusable(Exception):
    """The path cannot be inspected. The message is the reason."""


def look(text: str) -> tuple[Path, Kind]:
    """Expand `~` in a user's path. Return the path, and the kind of entry at it.

    A path below a regular file counts as missing, and so does a dangling link.

    Raises:
        Unusable: The text is not a path, or the system denies access.
    """
    if fault := path_fault(text):
        raise Unusable(fault)
    path = Path(text).expanduser()
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return path, "missing"
    except OSError as error:
        raise Unusable(f"cannot be used: {reason_of(error)}; check the path") from None
    if stat.S_ISDIR(mode):
        return path, "directory"
    return path, "file" if stat.S_ISREG(mode) else "other"


def file_faults(config: Config) -> Iterator[Fault]:
    """Configured paths that are missing, unreadable or of the wrong kind."""
    yield from _source_faults(("data", "source"), config.data)
    yield from _reward_faults(("reward", "functions"), config.reward.functions)
    if isinstance(config.objective, Custom) and config.objective.file is not None:
        text = f"no such file below {Path.cwd()}; give an existing file.py:name"
        yield from _expect(("objective", "path"), config.objective.file, "file", text, config.objective.path)
    if (teacher := config.objective.teacher) is not None and teacher.path.startswith((".", "/", "~")):
        text = "no such directory; give a model directory, a run, a hub name, or package:NAME"
        yield from _expect(("objective", "teacher", "path"), teacher.path, "directory", text)
    if config.evaluation.held_out is not None:
        yield from _source_faults(("evaluation", "held_out", "source"), config.evaluation.held_out)
    for index, task in enumerate(config.evaluation.tasks):
        key: Loc = ("evaluation", "tasks", index)
        yield from _source_faults((*key, "path") if task.preset else (*key, "data", "source"), task.dataset)
        yield from _reward_faults((*key, "reward"), task.reward)
    resume = config.checkpoint.resume
    if resume not in ("auto", "never"):
        key = ("checkpoint", "resume")
        yield from _expect(key, resume, "directory", "no such checkpoint directory; give auto, never or its path")
    yield from _deepspeed_faults(config.distributed.config)
    yield from _run_dir_faults(config)


def task_faults(config: Config) -> Iterator[Fault]:
    """Invalid options of `task:` sources, and columns or row numbers that they do not have."""
    faults = list(_task_faults(("data",), config.data))
    yield from faults
    if config.data.kind == "task" and not faults:
        size = config.data.task.get("size", 1000)
        assert isinstance(size, int)  # a row was read above, so the size is valid
        rows = min(size, config.data.max_rows or size)
        if rows < config.train.prompts_per_step:
            text = f"is more than the {rows} rows of {config.data.source}; lower it, or raise data.task.size"
            yield config.fault("train.prompts_per_step", text)
    for index, task in enumerate(config.evaluation.tasks):
        if task.data is not None:
            yield from _task_faults(("evaluation", "tasks", index, "data"), task.data)


def _expect(key: Loc, text: str, kind: Kind, missing: str, value: str | None = None) -> Iterator[Fault]:
    """Yield a fault if `text` is not the path of a `kind`.

    missing: Message for another kind, or a missing path. value: Value of the key. Default: `text`.
    """
    try:
        path, found = look(text)
    except Unusable as error:
        yield Fault(key, value or text, str(error))
        return
    if found != kind:
        yield Fault(key, value or text, missing)
    elif kind == "file" and not os.access(path, os.R_OK):
        yield Fault(key, value or text, "cannot be read: permission denied")


def _source_faults(key: Loc, data: DataConfig) -> Iterator[Fault]:
    if data.kind not in ("local", "hub"):
        return
    source = data.source
    try:
        path, found = look(source)
    except Unusable as error:
        yield Fault(key, source, str(error))
        return
    suffixes = ", ".join(LOCAL_SUFFIXES)
    if found == "missing":
        if data.kind == "local":
            yield Fault(key, source, f"no such file or directory below {Path.cwd()}; give an existing path")
        elif not _HUB_NAME.fullmatch(source):
            text = "is neither an existing path nor the name of a hub dataset, such as openai/gsm8k"
            yield Fault(key, source, text)
        return
    if data.subset is not None and key[-1] == "source":
        text = f"only hub datasets have subsets, and {source} is local; leave null"
        yield Fault((*key[:-1], "subset"), data.subset, text)
    if found == "other":
        yield Fault(key, source, f"is neither a file nor a directory; give one of {suffixes}")
    elif found == "directory":
        if not os.access(path, os.R_OK | os.X_OK):
            yield Fault(key, source, "cannot be read: permission denied")
        elif not _holds_data(path):
            yield Fault(key, source, f"the directory holds none of {suffixes}; give one that does")
    elif path.suffix.lower() not in LOCAL_SUFFIXES:
        yield Fault(key, source, f"unknown type of file; must be one of {suffixes}")
    elif not os.access(path, os.R_OK):
        yield Fault(key, source, "cannot be read: permission denied")
    elif path.stat().st_size == 0:
        yield Fault(key, source, "is an empty file; give one with rows")
    elif data.split != "train" and key[-1] == "source":
        yield Fault((*key[:-1], "split"), data.split, "a single file has only the split train")


def _holds_data(directory: Path) -> bool:
    """Whether the directory contains a data file within its first `_LOOKED_AT` entries."""
    try:
        found = list(islice(directory.rglob("*"), _LOOKED_AT))
    except OSError:  # the directory changed during the scan; loading reports real faults
        return True
    return len(found) == _LOOKED_AT or any(entry.suffix.lower() in LOCAL_SUFFIXES for entry in found)


def _reward_faults(key: Loc, functions: list[RewardFunction]) -> Iterator[Fault]:
    for index, function in enumerate(functions):
        if function.file is not None:
            text = f"no such file below {Path.cwd()}; give an existing file.py:function"
            yield from _expect((*key, index, "name"), function.file, "file", text, function.name)
        elif function.name == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
            text = "needs the package reasoning-gym; pip install 'qarl[tasks]'"
            yield Fault((*key, index, "name"), function.name, text)


def _deepspeed_faults(file: dict[str, Any] | str) -> Iterator[Fault]:
    if not isinstance(file, str):
        return
    key: Loc = ("distributed", "config")
    faults = list(_expect(key, file, "file", f"no such file below {Path.cwd()}; give an existing DeepSpeed JSON"))
    yield from faults
    if not faults:
        try:
            found = list(key_faults(deepspeed_keys(file)))
        except Unreadable as error:
            yield Fault(key, file, error.reason)
        else:
            yield from (Fault(key, file, f"{'.'.join(map(str, fault.key))} {fault.text}") for fault in found)


def _run_dir_faults(config: Config) -> Iterator[Fault]:
    key, text = ("train", "run_dir"), config.train.run_dir or "runs/unnamed"
    try:
        path, found = look(text)
        if found == "missing" and path.is_symlink():
            yield Fault(key, text, "is a broken link; remove it, or choose another directory")
            return
        for place in (path, *path.parents):
            _, kind = look(str(place))
            if kind == "directory":
                return
            if kind != "missing":
                yield Fault(key, text, f"{'it' if place == path else place} is not a directory; choose another")
                return
    except Unusable as error:
        yield Fault(key, text, str(error))


def _task_faults(key: Loc, data: DataConfig) -> Iterator[Fault]:
    if data.kind == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
        text = "needs the package reasoning-gym; pip install 'qarl[tasks]'"
        yield Fault((*key, "source"), data.source, text)
    if data.kind != "task":
        return
    try:
        row = generate(data.source, data.task, max_rows=1)[0]
    except UserError as error:
        option, _, text = str(error).removeprefix("data.task.").partition(": ")
        yield Fault((*key, "task", option), data.task.get(option), text)
        return
    for name, column in data.columns.items():
        if column not in row:
            text = f"{data.source} has no such column; it has {', '.join(row)}"
            yield Fault((*key, "columns", name), column, text)
            return
    columns = row | {name: row[column] for name, column in data.columns.items()}
    for _, field, spec, _ in string.Formatter().parse(data.prompt_template or ""):
        if field is None:
            continue
        if field not in columns:
            text = f"{data.source} has no column {field}; there are {', '.join(columns)}"
            yield Fault((*key, "prompt_template"), data.prompt_template, text)
        elif fault := _spec_fault(spec or ""):
            yield Fault((*key, "prompt_template"), data.prompt_template, f"{{{field}:{spec}}}: {fault}")


def _spec_fault(spec: str) -> str | None:
    """Return why a format specification is invalid for text, the type of all task columns; None if it is valid."""
    try:
        format("", spec if len(spec) <= 12 else "")
    except ValueError as error:
        return " ".join(str(error).split())
    return None
