"""What a run has behind it: whether its metrics and its checkpoints tell of the same steps. Imports no torch.

    history.json    {"began_after": 0, "checkpoint": 20}
                    of a run that ever had several ranks also {"ranks": [{"after": 0, "count": 2}, ...]}

Written with each checkpoint, and at the start of a run that resumes from the checkpoint of another one. Without it a
directory whose checkpoints were deleted would look like one that never had any, and the same command would train from
step 1 over the metrics and rollouts of the run before.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import Field

from qarl.errors import UserError
from qarl.inputs.files import NoSuchFile, Unreadable
from qarl.inputs.json import read_json
from qarl.inputs.schema import Record, Step, checked
from qarl.storage.disk import atomic_write_text, disk_errors
from qarl.storage.names import step_files
from qarl.storage.runs import METRICS, record_steps

HISTORY = "history.json"
START_OVER = "choose another train.run_dir to start over"


class RanksFrom(Record):
    """The steps after `after` are of `count` ranks, and add their sums in that order."""

    after: Step
    count: Annotated[int, Field(ge=1, lt=2**31)]


class History(Record):
    """began_after: the step of another run's checkpoint that this run began from, 0 without. checkpoint: the newest
    step that was saved here, 0 for none yet. ranks: where their number changed, ascending; one before the first."""

    began_after: Step = 0
    checkpoint: Step = 0
    ranks: list[RanksFrom] = Field([])


def read_history(run_dir: Path) -> History | None:
    """None where nothing was written yet. Raises UserError for a damaged file."""
    path = run_dir / HISTORY
    try:
        return checked(History, read_json(path), str(path))
    except NoSuchFile:
        return None
    except Unreadable as error:
        raise UserError(f"{error}; restore it, remove it if nothing else is gone, or {START_OVER}") from error


def write_history(run_dir: Path, history: History) -> None:
    """Durably. Raises UserError if the disk refuses."""
    path = run_dir / HISTORY
    with disk_errors(path):
        atomic_write_text(path, json.dumps(history.model_dump(exclude=None if history.ranks else {"ranks"})) + "\n")


def ranks_after(before: History | None, start: int, count: int) -> list[RanksFrom]:
    """`History.ranks` of a run that resumes from step `start` with `count` ranks. before: its history so far."""
    kept = [change for change in before.ranks if change.after < start] if before else []
    same = count == (kept[-1].count if kept else 1)
    return kept if same else [*kept, RanksFrom(after=start, count=count)]


def began_after(run_dir: Path, start: int, own: bool, every: int) -> int:
    """The step after which the record of this run begins, if it may resume from step `start`.

    Lines of later steps do not matter: they are dropped, and a kill may have cut off the last one.

    Args:
        run_dir: The run directory.
        start: The step of the checkpoint to resume from.
        own: Whether that checkpoint is in this directory. A run that begins anew, with step 0, has none.
        every: `checkpoint.every` of the start before.

    Raises:
        UserError: Checkpoints are gone, or lines of metrics.jsonl up to `start` are gone, twice or out of order.
    """
    path = run_dir / METRICS
    steps = record_steps(path)
    known = [step for step in steps if step is not None]
    history = read_history(run_dir)
    if not own and not steps and not step_files(run_dir / "rollouts", ".jsonl"):
        return start  # there is nothing that could be lost
    if history is None:  # nothing was saved here yet, or by an earlier qarl, whose runs are taken as they are
        first = known[0] - 1 if own and known else 0
        # A save comes after its step's metrics: one step later it was done.
        history = History(began_after=first, checkpoint=every if max(known, default=0) > every else 0)
    if not own:
        _require_anew(run_dir, history, start)
        return start
    count = max(0, start - history.began_after)
    whole = len(steps) >= count and all(step == history.began_after + 1 + i for i, step in enumerate(steps[:count]))
    if whole and all(step is None or step > start for step in steps[count:]):
        return history.began_after
    missing = _missing(known, history.began_after, start)
    twice = min((step for step, lines in Counter(known).items() if step <= start and lines > 1), default=None)
    what = f"holds step {twice} more than once" if twice else "does not hold each step once and in order"
    what = f"lacks {missing}" if missing else what
    raise UserError(
        f"{path}: {what}, and the checkpoint to resume from is of step {start}; restore the file, set "
        f"checkpoint.resume to a checkpoint before that, or {START_OVER}"
    )


def _require_anew(run_dir: Path, history: History, start: int) -> None:
    """Refuse to begin after `start`, with a checkpoint of another run or none, over what this run has behind it."""
    if start == 0 and history.checkpoint:
        raise UserError(
            f"{run_dir / 'checkpoints'}: the checkpoints of this run are gone (there was one of step "
            f"{history.checkpoint}); put them back to resume, or {START_OVER}"
        )
    if start == history.began_after:
        return
    if start == 0:
        raise UserError(
            f"{run_dir}: the run began from a checkpoint of another one, of step {history.began_after}, and has none "
            f"of its own yet; give that one as checkpoint.resume, or {START_OVER}"
        )
    raise UserError(
        f"checkpoint.resume: is a checkpoint of another run, and {run_dir} holds steps of its own; set "
        f"checkpoint.resume: auto to resume them, or {START_OVER}"
    )


def _missing(known: list[int], after: int, last: int) -> str:
    """The first stretch of steps after `after`, up to `last`, that is not among `known`, for people."""
    present = sorted({step for step in known if after < step <= last})
    low = after + 1
    for step in [*present, last + 1]:
        if step > low:
            return f"step {low}" if step == low + 1 else f"steps {low} to {step - 1}"
        low = step + 1
    return ""
