"""The history of a run: checks that its metrics and its checkpoints cover the same steps. Imports no torch.

    history.json    {"began_after": 0, "checkpoint": 20}
                    a run that ever had several ranks also has {"ranks": [{"after": 0, "count": 2}, ...]}

Written with each checkpoint, and at the start of a run that resumes from the checkpoint of another one. Without it, a
directory whose checkpoints were deleted would look like one that never had any, and the same command would train from
step 1 and overwrite the metrics and rollouts of the earlier run.
"""

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
    """The steps after `after` ran on `count` ranks, which determines the summation order."""

    after: Step
    count: Annotated[int, Field(ge=1, lt=2**31)]


class History(Record):
    """Content of history.json.

    Attributes:
        began_after: Step of another run's checkpoint that this run started from; 0 if it started from scratch.
        checkpoint: Newest step that was saved here; 0 if none.
        ranks: Where the number of ranks changed, ascending. A single process before the first entry.
    """

    began_after: Step = 0
    checkpoint: Step = 0
    ranks: list[RanksFrom] = Field([])


def read_history(run_dir: Path) -> History | None:
    """Return the history, or None if there is no file yet. Raises UserError if the file is damaged."""
    path = run_dir / HISTORY
    try:
        return checked(History, read_json(path), str(path))
    except NoSuchFile:
        return None
    except Unreadable as error:
        raise UserError(f"{error}; restore it, remove it if nothing else is gone, or {START_OVER}") from error


def write_history(run_dir: Path, history: History) -> None:
    """Write history.json durably. Raises UserError if the disk refuses."""
    path = run_dir / HISTORY
    with disk_errors(path):
        atomic_write_text(path, json.dumps(history.model_dump(exclude=None if history.ranks else {"ranks"})) + "\n")


def ranks_after(before: History | None, start: int, count: int) -> list[RanksFrom]:
    """Return `History.ranks` of a run that resumes from step `start` with `count` ranks. before: history so far."""
    kept = [change for change in before.ranks if change.after < start] if before else []
    same = count == (kept[-1].count if kept else 1)
    return kept if same else [*kept, RanksFrom(after=start, count=count)]


def began_after(run_dir: Path, start: int, own: bool, every: int) -> int:
    """Return the step after which this run's own metrics begin, after checking that it may resume from `start`.

    Lines of later steps do not matter: they are dropped, and a kill may have cut off the last one.

    Args:
        run_dir: The run directory.
        start: The step of the checkpoint to resume from.
        own: Whether that checkpoint is in this directory. False if the run starts from scratch (`start` 0).
        every: `checkpoint.every` of the previous start.

    Raises:
        UserError: Checkpoints are missing, or lines of metrics.jsonl up to `start` are missing, duplicated or out of
            order.
    """
    path = run_dir / METRICS
    steps = record_steps(path)
    known = [step for step in steps if step is not None]
    history = read_history(run_dir)
    if not own and not steps and not step_files(run_dir / "rollouts", ".jsonl"):
        return start  # nothing could be lost
    if history is None:  # nothing was saved here yet, or an older qarl wrote the run, which is not checked
        first = known[0] - 1 if own and known else 0
        # A save follows the metrics of its step, so it was complete one step later.
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
    """Refuse to start from another run's checkpoint or from scratch if this directory already has steps."""
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
    """Describe the first range of steps in (`after`, `last`] that is missing from `known`, for a message."""
    present = sorted({step for step in known if after < step <= last})
    low = after + 1
    for step in [*present, last + 1]:
        if step > low:
            return f"step {low}" if step == low + 1 else f"steps {low} to {step - 1}"
        low = step + 1
    return ""
