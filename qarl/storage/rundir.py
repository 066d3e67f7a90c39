"""The run directory `runs/NAME`: its lock and the configuration it was started with.

    .lock                 flock held by the only process that writes here
    config.yaml           resolved configuration, with every default
    environment.json      package versions, devices, threads, git revision, seed of the latest start; digests of
                          the model, the rewards, the objective and all files that the configuration names
    history.json          the newest saved checkpoint; written with the first one
    fault.json            which rank's error ended the latest start (several ranks)
    rank-001.log ...      output of the ranks other than the first under `qarl train --nproc`; rank-001/ has the logs of
                          their rewards and samplers
    rewards.log           output and failures of the reward functions
    metrics.jsonl, rollouts/, diagnostics/, tensorboard/    written by the recorder
    checkpoints/                                            written by the checkpoint store
    evaluations.jsonl, evaluations/                         written by the evaluations during training
    profile/                                                written by the profiler

Users' scripts read these files, so their names are a public interface.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qarl.config import Config
from qarl.config.yaml_io import parse_yaml
from qarl.distributed.ranks import Ranks, SingleProcess
from qarl.distributed.together import on_first, together
from qarl.errors import UserError
from qarl.inputs.files import read_text
from qarl.inputs.paths import path_errors
from qarl.storage.config_difference import config_difference
from qarl.storage.disk import atomic_write_text, disk_errors, remove_empty, require_kinds
from qarl.storage.environment import describe_environment, environment_changes
from qarl.storage.history import HISTORY, History, began_after, ranks_after, read_history, write_history
from qarl.storage.input_files import changed_while_training, input_files
from qarl.storage.lock import release_lock, take_lock
from qarl.storage.runs import EVALUATIONS, METRICS, read_run_config
from qarl.utils.text import first_few

WAIT_SECONDS = 10.0  # for a file to become visible to other nodes on a network file system

_BUSY = "in use by {holder}; wait for it, stop it, or choose another train.run_dir"
# Files of a start that was killed before `begin`.
_LEFT_BY_A_START = ("environment.json", "rewards.log", "sampler.log", "sampler", "wandb", "swanlog", "tensorboard")
# Directories of ranks other than the first.
_OF_A_RANK = re.compile(r"rank-[0-9]{3,9}(\.log)?")
# Files that a run writes or reads back. They must be regular files, not pipes or foreign entries.
_LOGS = ("rewards.log", "sampler.log")
_IDS = (".wandb_id", ".mlflow_run_id", ".swanlab_id")  # run ids in experiment trackers
_FILES = (*_IDS, "config.yaml", "environment.json", "fault.json", *_LOGS, HISTORY, METRICS, EVALUATIONS)
_FOLDERS = ("checkpoints", "rollouts", "diagnostics", "evaluations", "tensorboard", "profile")
# Kept after a refused start, because its error refers to them.
_KEPT = ("sampler.log", "rewards.log")


class RunDirectory:
    """One run's directory, locked for this process until `close` (also a context manager).

    `close` removes a directory that `open` created if the run did not `begin`. So a refused start leaves nothing behind
    except non-empty logs of the sampler and the rewards.

    With several ranks, all methods except `close` are collectives: the first rank holds the lock and writes.

    Attributes:
        path: The directory.
        checkpoints: Its directory of checkpoints.
    """

    def __init__(self, config: Config, ranks: Ranks, lock: int | None, created: list[Path]) -> None:
        self.path = Path(config.run_dir)
        self.checkpoints = self.path / "checkpoints"
        self._config, self._ranks = config, ranks
        self._lock: int | None = lock  # None on all ranks but the first
        self._created = created  # directories that `open` created, innermost first

    @classmethod
    def open(cls, config: Config, resume: str, ranks: Ranks | None = None) -> RunDirectory:
        """Create or reuse `config.run_dir` and lock it. Writes nothing except the lock before `begin`.

        Args:
            config: Configuration of the run.
            resume: `checkpoint.resume`. `auto` and a checkpoint path reuse a directory with results of the same
                configuration (`RESUMABLE_KEYS` may differ). `never` refuses one with metrics or checkpoints.
            ranks: Ranks of the run; None for a single process.

        Raises:
            UserError: The directory belongs to another configuration or program, is in use, or is not writable; or a
                rank does not see the files of the first.
        """
        ranks = ranks or SingleProcess()
        lock, created = on_first(ranks, lambda: _claim(config, resume)) or (None, [])
        directory = cls(config, ranks, lock, created)
        try:
            if ranks.count > 1:
                _require_shared(directory.path, ranks)
        except BaseException:
            directory.close()
            raise
        return directory

    def history_at(self, start: int, own: bool) -> History:
        """Return the run's history if it resumes from step `start`; see `qarl.storage.history.began_after`.

        Raises UserError, and changes nothing, if checkpoints or metrics up to that step are missing.
        """

        def found() -> dict[str, Any]:
            after = began_after(self.path, start, own, self._before().checkpoint.every)
            before = read_history(self.path) if own else None
            ranks = ranks_after(before, start, self._ranks.count)
            return History(began_after=after, checkpoint=start if own else 0, ranks=ranks).model_dump()

        return History.model_validate(self._ranks.gather(on_first(self._ranks, found))[0])

    def _before(self) -> Config:
        """Configuration of the previous start; of this one if there was none or its file is damaged."""
        try:
            return read_run_config(self.path)
        except UserError:
            return self._config

    def begin(self, inputs: Mapping[str, Any] | None = None, history: History | None = None) -> list[str]:
        """Write config.yaml and environment.json. From now on the directory is kept and bound to this configuration.

        Call once thread counts are set.

        Args:
            inputs: Digests of the run's inputs; the digests of `input_files` are added.
            history: Result of `history_at`.

        Returns:
            On the first rank, one line for each package, device or thread count that differs from the previous start.
            Each can prevent bit-identical resumption.

        Raises:
            UserError: The disk refuses, or a file that the configuration names cannot be read.
        """
        return on_first(self._ranks, lambda: self._begin(inputs or {}, history)) or []

    def _begin(self, inputs: Mapping[str, Any], history: History | None) -> list[str]:
        path = self.path / "environment.json"
        recorded = {**inputs, "files": input_files(self._config)}
        goes_on = history is not None and history.checkpoint > 0
        changed = changed_while_training(path, recorded) if goes_on else []
        scheduled = self._config.optim.schedule != "constant"  # a changed length changes the rate of every step
        if goes_on and scheduled and self._before().train.steps != self._config.train.steps:
            changed = list(dict.fromkeys([*changed, "train.steps, which optim.schedule depends on"]))
        if changed:
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
                with suppress(OSError):  # another process removed it first
                    self._clear()
            release_lock(self._lock)
            self._lock = None

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if _OF_A_RANK.fullmatch(entry.name) and entry.is_dir():
                _clear(entry)
                remove_empty([entry])
        _clear(self.path)
        remove_empty(self._created)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _claim(config: Config, resume: str) -> tuple[int, list[Path]]:
    """Create or reuse the directory, and lock it. Returns the lock, and the directories created, innermost first."""
    path = Path(config.run_dir)
    with path_errors(f"train.run_dir: {path}", "choose another"):
        if path.exists():
            _check_usable(path, config, resume)
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    lock = None
    with disk_errors(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = take_lock(path, _BUSY)
            # Check again under the lock: another process may have started here in between.
            _check_usable(path, config, resume)
        except BaseException:
            if lock is not None:
                release_lock(lock)
            remove_empty(created)
            raise
    return lock, created


def _require_shared(path: Path, ranks: Ranks) -> None:
    """Raise UserError on a rank that does not see the first rank's files."""
    token = path / ranks.gather(f".seen-{secrets.token_hex(8)}")[0]
    here, first = socket.gethostname(), ranks.gather(socket.gethostname())[0]

    def write() -> None:
        with disk_errors(path):
            token.touch()

    def look() -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not os.path.exists(token):
            if time.monotonic() > deadline:
                raise UserError(
                    f"{path}: on {here} this is not the directory that rank 0 writes to on {first}; set train.run_dir "
                    "to one on a disk that all nodes share"
                )
            time.sleep(0.05)

    try:
        on_first(ranks, write)
        together(ranks, look)
    finally:
        if ranks.first:
            token.unlink(missing_ok=True)


def _clear(folder: Path) -> None:
    """Remove the files of a refused start, except non-empty logs and the rank directories that contain them."""
    for entry in folder.iterdir():
        if entry.is_dir():
            if not _OF_A_RANK.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        elif entry.name not in _KEPT or not entry.lstat().st_size:
            entry.unlink(missing_ok=True)


def begun_configuration(path: Path) -> Config | None:
    """Return the configuration of the results in a run directory. None if there are no results, or if it is damaged,
    which `RunDirectory.open` reports.
    """
    try:
        return read_run_config(path) if path.is_dir() and _results(path) else None
    except (UserError, OSError):
        return None


def _check_usable(path: Path, config: Config, resume: str) -> None:
    """Raise UserError if `path` does not belong to this run."""
    if not path.is_dir():
        raise UserError(f"{path}: not a directory; choose another train.run_dir")
    require_kinds(path, _FILES, _FOLDERS, "train.run_dir")
    results = _results(path)
    stored = path / "config.yaml"
    if not stored.exists():
        # A start killed before `begin` leaves only our lock and empty directories.
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
    if not results:  # stopped before its first step: any configuration may start here
        return
    # Convert both to YAML, so that values are compared in their written form.
    try:
        theirs = _with_defaults(parse_yaml(read_text(stored), str(stored)))
    except UserError as error:
        raise UserError(f"{error}; restore it, or choose another train.run_dir") from error
    difference = config_difference(theirs, parse_yaml(config.to_yaml(), "configuration"))
    if difference:
        raise UserError(
            f"{path}: holds a run of another configuration ({first_few(difference, separator='; ')}); "
            "choose another train.run_dir, or restore these values"
        )
    if resume == "never":
        raise UserError(
            f"{path}: already holds {results[0]} and checkpoint.resume is never; "
            "choose another train.run_dir, or set checkpoint.resume: auto"
        )


def _results(path: Path) -> list[str]:
    """Return the names of a run's existing, non-empty results."""
    entries = [path / name for name in ("checkpoints", "metrics.jsonl", "rollouts")]
    return [
        entry.name
        for entry in entries
        if (any(entry.iterdir()) if entry.is_dir() else entry.exists() and entry.stat().st_size)
    ]


def _with_defaults(stored: Any) -> Any:
    """Add the defaults of keys that newer versions introduced to a stored configuration. Invalid ones are unchanged."""
    try:
        return parse_yaml(Config.model_validate(stored).to_yaml(), "configuration")
    except ValidationError:
        return stored
