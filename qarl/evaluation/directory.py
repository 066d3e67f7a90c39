"""Results directory of a resumable evaluation.

evaluation.json     identity: everything that determines the results; a different evaluation is rejected
completions.jsonl   one line per completion, appended durably
rewards.log         output of the reward functions, and their failures
results.json        results, written last
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from qarl.errors import UserError
from qarl.evaluation.records import append_rows, keep_rows, read_rows
from qarl.evaluation.results import CompletionRow, Row
from qarl.inputs.json import read_json_object
from qarl.storage.config_difference import config_difference
from qarl.storage.disk import disk_errors, remove_empty, require_kinds, require_output, write_json
from qarl.storage.lock import release_lock, take_lock
from qarl.utils.text import first_few

PLACE = "--out"
_BUSY = f"in use by another evaluation; wait until it ends, or choose another {PLACE}"
FILES = ("evaluation.json", "completions.jsonl", "rewards.log", "results.json")
LEFT_BY_A_START = (".lock", "rewards.log")  # left by an evaluation that was killed before `begin`


class ResultsDirectory:
    """Completions of a resumable evaluation. A context manager that locks the directory for this process.

    `close` removes a directory that `open` created if no evaluation called `begin`.
    """

    def __init__(self, path: Path, identity: dict[str, Any], lock: int, created: list[Path]) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._identity = identity
        self._lock: int | None = lock
        self._created = created  # directories created by `open`, innermost first

    @classmethod
    def open(cls, path: Path, identity: dict[str, Any]) -> ResultsDirectory:
        """Create or reuse `path`, and lock it.

        Args:
            path: The directory.
            identity: JSON values that determine the results and are known before the weights are loaded.

        Raises:
            UserError: The directory belongs to another evaluation or program, is in use, or is not writable.
        """
        identity = json.loads(json.dumps(identity))
        require_output(path, PLACE, folder=True)
        require_kinds(path, FILES, (), PLACE)
        _require_same(path, identity)
        created = [folder for folder in (path, *path.parents) if not folder.exists()]
        with disk_errors(path, place=PLACE):
            path.mkdir(parents=True, exist_ok=True)
            return cls(path, identity, take_lock(path, _BUSY), created)

    @property
    def completions(self) -> Path:
        return self.path / "completions.jsonl"

    def begin(self, late: dict[str, Any], samples: int) -> None:
        """Read the existing completions. From now on `close` keeps the directory.

        Args:
            late: The rest of the identity, such as a digest of the weights.
            samples: Completions per prompt. Prompts with fewer were interrupted and are sampled again.

        Raises:
            UserError: The directory holds results of another identity, or cannot be written.
        """
        identity = {**self._identity, **late}
        _require_same(self.path, identity)
        if not (self.path / "evaluation.json").exists():
            write_json(self.path / "evaluation.json", identity, PLACE, indent=2)
        self._created = []
        found: dict[tuple[str, int], list[int]] = {}
        for row in read_rows(self.completions, CompletionRow):
            found.setdefault((row["task"], row["prompt_id"]), []).append(row["sample"])
        whole = {key for key, sampled in found.items() if sorted(sampled) == list(range(samples))}
        self.rows = keep_rows(
            self.completions, CompletionRow, lambda row: (row["task"], row["prompt_id"]) in whole, PLACE
        )

    def append(self, rows: list[Row]) -> None:
        append_rows(self.completions, rows, PLACE)
        self.rows += rows

    def finish(self, results: dict[str, Any]) -> None:
        """Write results.json."""
        write_json(self.path / "results.json", results, PLACE, indent=2)

    def close(self) -> None:
        if self._lock is not None:
            if self._created:
                shutil.rmtree(self.path, ignore_errors=True)
                remove_empty(self._created[1:])
            release_lock(self._lock)
            self._lock = None

    def __enter__(self) -> ResultsDirectory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _require_same(path: Path, identity: dict[str, Any]) -> None:
    """Raise UserError if `path` holds an evaluation with other values for the keys of `identity`, or other files."""
    if not path.exists():
        return
    stored = path / "evaluation.json"
    if not stored.exists():
        foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in LEFT_BY_A_START)
        if foreign:
            raise UserError(
                f"{path}: not a results directory (it holds {foreign[0]!r} but no evaluation.json); "
                f"choose another {PLACE}"
            )
        return
    try:
        theirs = read_json_object(stored)
    except UserError as error:
        raise UserError(f"{error}; choose another {PLACE}") from error
    if missing := [key for key in identity if key not in theirs]:
        raise UserError(
            f"{path}: its evaluation.json, written by an older qarl, does not record {missing[0]!r}, so it may hold a "
            f"different evaluation; choose another {PLACE}"
        )
    difference = config_difference({key: theirs[key] for key in identity}, identity)
    if difference:
        raise UserError(
            f"{path}: holds the results of another evaluation ({first_few(difference, separator='; ')}); "
            f"choose another {PLACE}, or restore these values"
        )
