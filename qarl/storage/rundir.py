"""The run directory `runs/NAME`: who may write it, and what it was started with.

    .lock                 flock of the one process that writes here
    config.yaml           resolved configuration, with every default
    environment.json      package versions, devices, threads, git revision, seed of the latest start; digests of
                          the model, the rewards, the objective and all files that the configuration names
    history.json          the newest checkpoint that was saved, with the first of them
    fault.json            which of several ranks ended the latest start, and how
    rank-001.log ...      what other ranks than the first print under `qarl train --nproc`; rank-001/ has the logs of
                          their rewards and samplers
    rewards.log           what the reward functions print, and each of their failures
    metrics.jsonl, rollouts/, diagnostics/, tensorboard/    written by the recorder
    checkpoints/                                            written by the checkpoint store
    evaluations.jsonl, evaluations/                         written by the evaluations during training
    profile/                                                written by the profiler

Users' scripts read these: names and places are an interface.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qarl.config import Config
from qarl.config.by_device import ON_CPU
from qarl.config.yaml_io import parse_yaml
from qarl.errors import UserError
from qarl.inputs.files import read_text
from qarl.inputs.json import flatten
from qarl.inputs.paths import path_errors
from qarl.storage.disk import atomic_write_text, disk_errors, require_kinds
from qarl.storage.environment import describe_environment, environment_changes
from qarl.storage.history import HISTORY, History, began_after, ranks_after, read_history, write_history
from qarl.storage.input_files import changed_while_training, input_files
from qarl.storage.lock import holder, open_lock, write_holder
from qarl.storage.runs import EVALUATIONS, METRICS, read_run_config

# Keys that may differ between a run and its resumption. None of them changes a step that was already taken;
# `train.steps` extends a run (and stretches a linear or cosine schedule from there on); an evaluation draws from
# counted random streams, so that it leaves nothing behind in the sampler; the number of ranks and how they hold the
# masters change the order of sums from there on, which history.json says. Everything else, thread count, batch limits
# and paths included, can change bits of the result and is refused.
RESUMABLE_KEYS = (
    "train.steps",
    "train.run_dir",
    "train.profile",
    "train.profile.",
    "checkpoint.",
    "logging.",
    "diagnostics.",
    "evaluation.",
    "distributed.",
    "model.verify_digests",
    "rollout.vllm.device",
    "rollout.vllm.data_parallel",
    "rollout.vllm.memory_frac",
    "rollout.vllm.timeout_s",
    "rollout.vllm.max_restarts",
)

# A forked child shares its parent's lock, and a reward worker may outlive a killed run: children close it at once.
_locks_held: set[int] = set()


def _drop_locks_in_child() -> None:
    for fd in _locks_held:
        os.close(fd)
    _locks_held.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)


# What a start leaves that was killed before `begin`.
_LEFT_BY_A_START = ("environment.json", "rewards.log", "sampler.log", "sampler", "wandb", "swanlog", "tensorboard")
# What ranks other than the first keep there.
_OF_A_RANK = re.compile(r"rank-[0-9]{3,9}(\.log)?")
# What a run writes or reads back: never into a pipe, and not into what somebody else put there.
_LOGS = ("rewards.log", "sampler.log")
_IDS = (".wandb_id", ".mlflow_run_id", ".swanlab_id")  # of the run in a tracker
_FILES = (*_IDS, "config.yaml", "environment.json", "fault.json", *_LOGS, HISTORY, METRICS, EVALUATIONS)
_FOLDERS = ("checkpoints", "rollouts", "diagnostics", "evaluations", "tensorboard", "profile")
# What a refused start leaves, since its error refers to it.
_KEPT = ("sampler.log", "rewards.log")


class RunDirectory:
    """One run's directory, locked for this process until `close` (also a context manager).

    path: the directory. ranks: how many the run has; see `qarl.storage.shared_rundir` for more than one. A directory
    that `open` created and in which the run did not `begin` is removed by `close`: a start that is refused leaves
    nothing behind, but the logs of the sampler and the rewards where they hold anything.
    """

    def __init__(self, path: Path, config: Config, lock: int | None, created: list[Path], ranks: int = 1) -> None:
        self.path, self.ranks = path, ranks
        self.checkpoints = path / "checkpoints"
        self._config = config
        self._lock: int | None = lock
        self._created = created  # directories that were not there before, innermost first

    @classmethod
    def open(cls, config: Config, resume: str, ranks: int = 1) -> RunDirectory:
        """Create or reuse `config.run_dir` and lock it. Apart from the lock nothing is written before `begin`.

        resume: `checkpoint.resume`: `auto` and a checkpoint path reuse a directory that holds results of the same
        configuration (`RESUMABLE_KEYS` may differ); `never` refuses one that holds metrics or checkpoints.
        Raises UserError for a directory of another configuration, of another program, in use by another process, or
        not writable.
        """
        path = Path(config.run_dir)
        with path_errors(f"train.run_dir: {path}", "choose another"):
            if path.exists():
                _check_usable(path, config, resume)
        created = [folder for folder in (path, *path.parents) if not folder.exists()]
        lock = None
        with disk_errors(path):
            try:
                path.mkdir(parents=True, exist_ok=True)
                lock = _lock(path)
                # Again, now that nobody else can write: another process may have started here in between.
                _check_usable(path, config, resume)
            except BaseException:
                if lock is not None:
                    _unlock(lock)
                _remove_empty(created)
                raise
        return cls(path, config, lock, created, ranks)

    def history_at(self, start: int, own: bool) -> History:
        """What the run has behind it if it resumes from step `start`; see `qarl.storage.history.began_after`.

        Raises UserError, with nothing changed, where checkpoints or metrics up to there are gone.
        """
        after = began_after(self.path, start, own, self._every_before())
        before = read_history(self.path) if own else None
        ranks = ranks_after(before, start, self.ranks)
        return History(began_after=after, checkpoint=start if own else 0, ranks=ranks)

    def _every_before(self) -> int:
        """`checkpoint.every` of the previous start; of this one if there was none or its file is damaged."""
        try:
            return read_run_config(self.path).checkpoint.every
        except UserError:
            return self._config.checkpoint.every

    def begin(self, inputs: Mapping[str, Any] | None = None, history: History | None = None) -> list[str]:
        """Write config.yaml and environment.json: from now on the directory stays, and belongs to this configuration.

        Call once thread counts are set.

        Args:
            inputs: Digests of what the run is made from; the digests of `input_files` are added.
            history: Of `history_at`.

        Returns:
            One line for each package, device or thread count that differs from the previous start. Each can cost
            bit-identical resumption.

        Raises:
            UserError: The disk refuses, or a file that the configuration names cannot be read.
        """
        path = self.path / "environment.json"
        recorded = {**(inputs or {}), "files": input_files(self._config)}
        goes_on = history is not None and history.checkpoint > 0
        if changed := changed_while_training(path, recorded) if goes_on else []:
            recorded["changed"] = changed
        environment = describe_environment(self._config.train.seed, recorded)
        changes = environment_changes(path, environment)
        with disk_errors(self.path):
            atomic_write_text(path, json.dumps(environment, indent=2) + "\n")
            atomic_write_text(self.path / "config.yaml", self._config.to_yaml())
        if history is not None and history != (read_history(self.path) or History()):
            write_history(self.path, history)
        self._created = []
        return changes

    def close(self) -> None:
        if self._lock is not None:
            if self._created:
                with suppress(OSError):  # somebody else removed it first
                    self._clear()
            _unlock(self._lock)
            self._lock = None

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if _OF_A_RANK.fullmatch(entry.name) and entry.is_dir():
                _clear(entry)
                _remove_empty([entry])
        _clear(self.path)
        _remove_empty(self._created)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _clear(folder: Path) -> None:
    """Remove what a refused start left, except for non-empty logs and the folders of ranks that have some."""
    for entry in folder.iterdir():
        if entry.is_dir():
            if not _OF_A_RANK.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        elif entry.name not in _KEPT or not entry.lstat().st_size:
            entry.unlink(missing_ok=True)


def begun_configuration(path: Path) -> Config | None:
    """The configuration that the results in a run directory are of; None where there are none, or it is damaged, which
    `RunDirectory.open` says."""
    try:
        return read_run_config(path) if path.is_dir() and _results(path) else None
    except (UserError, OSError):
        return None


def _remove_empty(folders: list[Path]) -> None:
    """Innermost first, up to the first that is missing or in use."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _check_usable(path: Path, config: Config, resume: str) -> None:
    """Raise UserError if `path` holds something else than this run."""
    if not path.is_dir():
        raise UserError(f"{path}: not a directory; choose another train.run_dir")
    require_kinds(path, _FILES, _FOLDERS, "train.run_dir")
    results = _results(path)
    stored = path / "config.yaml"
    if not stored.exists():
        # A start killed before `begin` leaves our lock and empty folders, nothing visible else.
        foreign = sorted(
            entry.name
            for entry in path.iterdir()
            if not entry.name.startswith(".")
            and entry.name not in _LEFT_BY_A_START
            and not _OF_A_RANK.fullmatch(entry.name)
            and (entry.name in results or entry.name not in ("rollouts", "checkpoints", "metrics.jsonl"))
        )
        if foreign:
            raise UserError(
                f"{path}: not a run directory (it holds {foreign[0]!r} but no config.yaml); "
                "choose another train.run_dir"
            )
        return
    if not results:  # stopped before its first step: nothing that another configuration could contradict
        return
    # Both through YAML, so that values are compared as they are written.
    try:
        theirs = _with_defaults(parse_yaml(read_text(stored), str(stored)))
    except UserError as error:
        raise UserError(f"{error}; restore it, or choose another train.run_dir") from error
    difference = config_difference(theirs, parse_yaml(config.to_yaml(), "configuration"))
    if difference:
        more = f" and {len(difference) - 3} more" if len(difference) > 3 else ""
        raise UserError(
            f"{path}: holds a run of another configuration ({'; '.join(difference[:3])}{more}); "
            "choose another train.run_dir, or restore these values"
        )
    if resume == "never":
        raise UserError(
            f"{path}: already holds {results[0]} and checkpoint.resume is never; "
            "choose another train.run_dir, or set checkpoint.resume: auto"
        )


def _results(path: Path) -> list[str]:
    """Which of a run's results are there and not empty."""
    entries = [path / name for name in ("checkpoints", "metrics.jsonl", "rollouts")]
    return [
        entry.name
        for entry in entries
        if (any(entry.iterdir()) if entry.is_dir() else entry.exists() and entry.stat().st_size)
    ]


def _with_defaults(stored: Any) -> Any:
    """A run's configuration with the keys that came after it: they mean their defaults. As it is where it is none."""
    try:
        return parse_yaml(Config.model_validate(stored).to_yaml(), "configuration")
    except ValidationError:
        return stored


def config_difference(theirs: Any, ours: Any) -> list[str]:
    """`key is X there, Y here` for each dotted key that differs and must not.

    `RESUMABLE_KEYS` may; and a size that is left to the device here is the one there. Lists are compared by element.
    """
    return list(_differences(flatten(theirs), flatten(ours)))


def _differences(there: dict[str, Any], here: dict[str, Any]) -> Iterator[str]:
    for key in [*here, *(key for key in there if key not in here)]:
        theirs, ours = there.get(key), here.get(key)
        if (key in there, theirs) == (key in here, ours) or _may_differ(key) or (key in ON_CPU and ours is None):
            continue
        if theirs and ours and isinstance(theirs, list) and isinstance(ours, list):
            yield from _differences(flatten(dict(enumerate(theirs)), key), flatten(dict(enumerate(ours)), key))
        else:
            yield f"{key} is {_short(there, key)} there, {_short(here, key)} here"


def _may_differ(key: str) -> bool:
    return any(key.startswith(allowed) if allowed.endswith(".") else key == allowed for allowed in RESUMABLE_KEYS)


def _short(values: dict[str, Any], key: str) -> str:
    if key not in values:
        return "not set"
    text = json.dumps(values[key], default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _lock(path: Path) -> int:
    fd = open_lock(path / ".lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        by = holder(fd)
        os.close(fd)
        raise UserError(f"{path}: in use by {by}; wait for it, stop it, or choose another train.run_dir") from None
    except BaseException:
        os.close(fd)
        raise
    _locks_held.add(fd)
    write_holder(fd)
    return fd


def _unlock(fd: int) -> None:
    _locks_held.discard(fd)
    os.close(fd)
