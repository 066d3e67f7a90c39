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
from qarl.storage.lock import release_lock, take_lock
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
    "rollout.async.device",
    "rollout.async.kept_versions",
    "rollout.async.timeout_s",
    "rollout.async.max_restarts",
)

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

    Attributes:
        path: The directory.
        ranks: Number of ranks of the run; see `qarl.storage.shared_rundir` for several.
    """

    def __init__(self, path: Path, config: Config, lock: int | None, created: list[Path], ranks: int = 1) -> None:
        self.path, self.ranks = path, ranks
        self.checkpoints = path / "checkpoints"
        self._config = config
        self._lock: int | None = lock
        self._created = created  # directories that `open` created, innermost first

    @classmethod
    def open(cls, config: Config, resume: str, ranks: int = 1) -> RunDirectory:
        """Create or reuse `config.run_dir` and lock it. Writes nothing except the lock before `begin`.

        Args:
            config: Configuration of the run.
            resume: `checkpoint.resume`. `auto` and a checkpoint path reuse a directory with results of the same
                configuration (`RESUMABLE_KEYS` may differ). `never` refuses one with metrics or checkpoints.
            ranks: Number of ranks.

        Raises:
            UserError: The directory belongs to another configuration or program, is in use, or is not writable.
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
                lock = take_lock(path, _BUSY)
                # Check again under the lock: another process may have started here in between.
                _check_usable(path, config, resume)
            except BaseException:
                if lock is not None:
                    release_lock(lock)
                _remove_empty(created)
                raise
        return cls(path, config, lock, created, ranks)

    def history_at(self, start: int, own: bool) -> History:
        """Return the run's history if it resumes from step `start`; see `qarl.storage.history.began_after`.

        Raises UserError, and changes nothing, if checkpoints or metrics up to that step are missing.
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
        """Write config.yaml and environment.json. From now on the directory is kept and bound to this configuration.

        Call once thread counts are set.

        Args:
            inputs: Digests of the run's inputs; the digests of `input_files` are added.
            history: Result of `history_at`.

        Returns:
            One line for each package, device or thread count that differs from the previous start. Each can prevent
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
                with suppress(OSError):  # another process removed it first
                    self._clear()
            release_lock(self._lock)
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


def _remove_empty(folders: list[Path]) -> None:
    """Remove empty directories, innermost first, up to the first that is missing or in use."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


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


def config_difference(theirs: Any, ours: Any) -> list[str]:
    """Return `key is X there, Y here` for each dotted key that must not differ but does.

    `RESUMABLE_KEYS` may differ. A size that is automatic here takes the stored value. Lists are compared by element.
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
