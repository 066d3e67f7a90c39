"""Names that hold a training step, `000010`, `000010.jsonl`: what qarl writes, and nothing that only looks like it."""

from __future__ import annotations

import re
from pathlib import Path

from qarl.inputs.paths import path_errors
from qarl.inputs.schema import STEP_LIMIT
from qarl.storage.disk import fsync_directory

_DIGITS = re.compile(r"[0-9]{6,10}")  # ASCII alone: Python's isdigit() and \d know many more


def step_name(step: int) -> str:
    return f"{step:06d}"


def step_of(name: str) -> int | None:
    """The step that `step_name` made `name` of; None for every other name."""
    if not _DIGITS.fullmatch(name):
        return None
    step = int(name)
    return step if step <= STEP_LIMIT and step_name(step) == name else None


def step_files(folder: Path, suffix: str) -> dict[int, Path]:
    """Step -> the entry of `folder` named by it and `suffix`, ascending; empty where there is no such folder.

    Raises UserError if the folder cannot be looked into.
    """
    with path_errors(str(folder), "make it readable"):
        try:
            entries = list(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return {}
    found = {step_of(path.name.removesuffix(suffix)): path for path in entries if path.name.endswith(suffix)}
    return {step: found[step] for step in sorted(step for step in found if step is not None)}


def remove_later(folder: Path, suffix: str, step: int) -> None:
    """Remove what `step_files` finds of steps after `step`. Raises OSError, UserError."""
    later = [path for other, path in step_files(folder, suffix).items() if other > step]
    for path in later:
        path.unlink()
    if later:
        fsync_directory(folder)


def checkpoint_steps(checkpoints: Path) -> list[int]:
    """Steps of which the directory has a checkpoint, ascending; whether they are intact, reading them tells."""
    return [step for step, path in step_files(checkpoints, "").items() if path.is_dir()]
