"""A results directory: what was evaluated, its completions as they come, and the results at the end.

evaluation.json     what decides the results; another evaluation is refused
completions.jsonl   one line a completion, appended durably
rewards.log         what the reward functions print, and each of their failures
results.json        written last
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from qarl.errors import UserError
from qarl.evaluation.records import append_rows, keep_rows, read_rows
from qarl.evaluation.results import CompletionRow, Row
from qarl.inputs.json import read_json_object
from qarl.storage.disk import atomic_write_text, disk_errors, require_kinds, require_output
from qarl.storage.lock import open_lock
from qarl.storage.rundir import config_difference

PLACE = "--out"
FILES = ("evaluation.json", "completions.jsonl", "rewards.log", "results.json")
LEFT_BY_A_START = (".lock", "rewards.log")  # of one that was killed before `begin`


class ResultsDirectory:
    """The `Sink` of a resumable evaluation; a context manager that holds the directory for this process.

    A directory that `open` created, and in which no evaluation did `begin`, is removed by `close`.
    """

    def __init__(self, path: Path, identity: dict[str, Any], lock: int, created: list[Path]) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._identity = identity
        self._lock: int | None = lock
        self._created = created  # directories that were not there before, innermost first

    @classmethod
    def open(cls, path: Path, identity: dict[str, Any]) -> ResultsDirectory:
        """Create or reuse `path`, and lock it.

        identity: JSON values that decide the results, as far as they are known before the weights are loaded.
        Raises UserError for a directory of another evaluation, of another program, in use, or not writable.
        """
        identity = json.loads(json.dumps(identity))
        require_output(path, PLACE, folder=True)
        require_kinds(path, FILES, (), PLACE)
        _require_same(path, identity)
        created = [folder for folder in (path, *path.parents) if not folder.exists()]
        with disk_errors(path, place=PLACE):
            path.mkdir(parents=True, exist_ok=True)
            return cls(path, identity, _lock(path), created)

    @property
    def completions(self) -> Path:
        return self.path / "completions.jsonl"

    def begin(self, late: dict[str, Any], samples: int) -> None:
        """Read the existing completions; from now on the directory is kept.

        late: the rest of the identity, such as a digest of the weights. samples: for each prompt; a prompt with fewer
        was cut short and is drawn again.
        Raises UserError if the directory holds results of another identity, or cannot be written.
        """
        identity = {**self._identity, **late}
        _require_same(self.path, identity)
        with disk_errors(self.path, place=PLACE):
            if not (self.path / "evaluation.json").exists():
                atomic_write_text(self.path / "evaluation.json", json.dumps(identity, indent=2) + "\n")
        self._created = []
        found: dict[tuple[str, int], list[int]] = {}
        for row in read_rows(self.completions, CompletionRow):
            found.setdefault((row["task"], row["prompt_id"]), []).append(row["sample"])
        whole = {key for key, drawn in found.items() if sorted(drawn) == list(range(samples))}
        self.rows = keep_rows(
            self.completions, CompletionRow, lambda row: (row["task"], row["prompt_id"]) in whole, PLACE
        )

    def append(self, rows: list[Row]) -> None:
        append_rows(self.completions, rows, PLACE)
        self.rows += rows

    def finish(self, results: dict[str, Any]) -> None:
        """Write results.json."""
        path, text = self.path / "results.json", json.dumps(results, indent=2, allow_nan=False) + "\n"
        with disk_errors(path, len(text), PLACE):
            atomic_write_text(path, text)

    def close(self) -> None:
        if self._lock is not None:
            if self._created:
                shutil.rmtree(self.path, ignore_errors=True)
                with suppress(OSError):  # up to the first that is in use
                    for folder in self._created[1:]:
                        folder.rmdir()
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> ResultsDirectory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _require_same(path: Path, identity: dict[str, Any]) -> None:
    """Raise UserError if `path` holds another evaluation, judged by the keys of `identity`, or something else."""
    if not path.exists():
        return
    stored = path / "evaluation.json"
    if not stored.exists():
        foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in LEFT_BY_A_START)
        if foreign:
            raise UserError(
                f"{path}: no results of an evaluation (it holds {foreign[0]!r} but no evaluation.json); "
                f"choose another {PLACE}"
            )
        return
    try:
        theirs = read_json_object(stored)
    except UserError as error:
        raise UserError(f"{error}; choose another {PLACE}") from error
    if missing := [key for key in identity if key not in theirs]:
        raise UserError(
            f"{path}: its evaluation.json does not record {missing[0]!r} (an older qarl wrote it), so it is unknown "
            f"whether it holds the same evaluation; choose another {PLACE}"
        )
    difference = config_difference({key: theirs[key] for key in identity}, identity)
    if difference:
        raise UserError(
            f"{path}: holds the results of another evaluation ({'; '.join(difference[:3])}); "
            f"choose another {PLACE}, or restore these values"
        )


def _lock(path: Path) -> int:
    fd = open_lock(path / ".lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UserError(f"{path}: in use by another evaluation; wait for it, or choose another {PLACE}") from None
    return fd
