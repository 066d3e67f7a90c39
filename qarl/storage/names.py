"""File names that contain a training step (`000010`, `000010.jsonl`), matched strictly."""

import re
from pathlib import Path

from qarl.inputs.paths import path_errors
from qarl.inputs.schema import STEP_LIMIT
from qarl.storage.disk import fsync_directory

_DIGITS = re.compile(r"[0-9]{6,10}")  # ASCII only: Python's isdigit() and \d also match other Unicode digits


def step_name(step: int) -> str:
    return f"{step:06d}"


def step_of(name: str) -> int | None:
    """Inverse of `step_name`; None for any other name."""
    if not _DIGITS.fullmatch(name):
        return None
    step = int(name)
    return step if step <= STEP_LIMIT and step_name(step) == name else None


def step_files(folder: Path, suffix: str) -> dict[int, Path]:
    """Return the entries of `folder` named by a step and `suffix`, by ascending step; empty if there is no such folder.

    Raises UserError if the folder cannot be read.
    """
    with path_errors(str(folder), "make it readable"):
        try:
            entries = list(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return {}
    found = {step_of(path.name.removesuffix(suffix)): path for path in entries if path.name.endswith(suffix)}
    return {step: found[step] for step in sorted(step for step in found if step is not None)}


def remove_later(folder: Path, suffix: str, step: int) -> None:
    """Remove the entries found by `step_files` with later steps than `step`. Raises OSError, UserError."""
    later = [path for other, path in step_files(folder, suffix).items() if other > step]
    for path in later:
        path.unlink()
    if later:
        fsync_directory(folder)


def checkpoint_steps(checkpoints: Path) -> list[int]:
    """Return the steps that have a checkpoint, ascending, without checking whether they are intact."""
    return [step for step, path in step_files(checkpoints, "").items() if path.is_dir()]
