"""What a run keeps of itself: going on from a checkpoint, saving finished steps, and rescuing them after a fault."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.config.checkpoint import CheckpointConfig
from qarl.distributed.ranks import Ranks
from qarl.distributed.together import on_first
from qarl.storage.checkpoint import CheckpointStore
from qarl.storage.history import History, write_history
from qarl.storage.names import checkpoint_steps
from qarl.storage.rundir import RunDirectory
from qarl.training.console import RunConsole
from qarl.training.recorder import Recorder
from qarl.training.setup import Run
from qarl.training.state import capture, restore
from qarl.utils.signals import is_stop


@dataclass(frozen=True)
class Finished:
    """After a step: what a checkpoint of it holds beside masters and optimizer, while these are still its own.

    position: of the data. skipped: `Learner.skipped_in_a_row`. begun: `Updates.begun`. loss_scale: `LossScale.state`.
    """

    step: int
    position: dict[str, Any]
    skipped: int
    begun: int
    loss_scale: dict[str, Any]


def refuse_vanished(resume: str, directory: RunDirectory, ranks: Ranks) -> None:
    """Before anything is loaded: where no checkpoint of a begun run is there any more. A collective.

    resume: `checkpoint.resume`. Raises UserError as `RunDirectory.history_at`.
    """
    if resume == "auto" and not ranks.gather(checkpoint_steps(directory.checkpoints))[0]:
        directory.history_at(0, own=False)


class CheckpointManager:
    """The checkpoints of one run. Call `resume` first, then `finish` after every step. All ranks of a run have one, and
    call `resume`, `save` and `rescue` together.

    unrecorded: a step that was learned from and is not yet in metrics.jsonl, with the metrics that are known of it.
    """

    def __init__(self, config: CheckpointConfig, run: Run, directory: RunDirectory, console: RunConsole) -> None:
        self.config, self.run, self.directory, self.console = config, run, directory, console
        self.ranks = run.learner.ranks
        self.store = CheckpointStore(directory.checkpoints, config.keep_last, self.ranks)
        self.history = History()
        self.saved_step = 0  # of a new run there is nothing to save before its first step
        self.unrecorded: tuple[int, dict[str, float]] | None = None
        self._refused_step = 0  # one that could not be saved

    def resume(self) -> int:
        """The step to go on from; a checkpoint, if there is one to take, is put back, and later ones are removed.

        Raises UserError, with the directory as it was, where something of the run is gone or its inputs have changed.
        """
        found = None
        if self.config.resume == "auto":
            found = self.store.latest_valid(self.console.warn)
        elif self.config.resume != "never":
            found = self.store.load(Path(self.config.resume).expanduser(), ranks=self.ranks)
        if found is None:
            self.history = self.directory.history_at(0, own=False)
            return 0
        own = found.path == self.store.path(found.step).resolve()  # and not that of another run
        self.history = self.directory.history_at(found.step, own)
        for change in restore(self.run, found, self.config.allow_changed):
            self.console.warn(change)
        for step in self.store.discard_after(found.step):
            self.console.warn(f"checkpoint {step} is later than the one resumed from, and was removed")
        if own:
            self.saved_step = found.step
        self.console.message(f"resumed from {found.path} (step {found.step})")
        return found.step

    def how_to_resume(self) -> str:
        same = "the same command"
        return same if self.config.resume == "auto" else f"{same} with checkpoint.resume=auto"

    def learned(self, step: int, metrics: dict[str, float]) -> None:
        """The weights are those after `step`, whose metrics are not on the disk yet. metrics: are filled further."""
        self.unrecorded = step, metrics

    def finish(self, step: int) -> None:
        """The run is now exactly after `step`, and its metrics are on the disk."""
        run = self.run
        self.unrecorded = None
        if run.ahead is not None:
            run.ahead.finish()
        learner, updates = run.learner, run.updates
        state = run.stream.state(), learner.skipped_in_a_row, updates.begun, updates.scale.state()
        self.finished = Finished(step, *state)

    def save(self) -> None:
        """A checkpoint of the finished step, unless there is one. Raises UserError if the disk refuses."""
        finished = self.finished
        if finished.step == self.saved_step:
            return
        assert self.run.updates.begun == finished.begun, "the masters are those of a later step"
        self.run.learner.skipped_in_a_row = finished.skipped
        self.run.updates.scale.load(finished.loss_scale)
        self._refused_step = finished.step
        with self.console.phase("checkpoint"):
            self.store.save_pieces(finished.step, *capture(self.run, finished.position))
        self.saved_step, self._refused_step = finished.step, 0
        self.history = self.history.model_copy(update={"checkpoint": finished.step})
        on_first(self.ranks, lambda: write_history(self.directory.path, self.history))

    def rescue(self, recorder: Recorder, fault: BaseException) -> None:
        """Save the finished step after an exception, and print from which step the run can go on.

        The newest checkpoint stands if the learner has begun an optimizer step, because the masters are then between
        two steps. A step that the learner completed and that only lacks its metrics is finished here, with the metrics
        that are known. With several ranks, saving is a collective: it is attempted only if all ranks raised together
        (`Ranks.all_agree`). If one rank raised alone, the others are elsewhere or gone, and a collective would hang.

        Args:
            recorder: Writes the metrics of a step that lacks them.
            fault: The exception that ended the run, of any class.

        Raises:
            StoppedAtOnce: A second Ctrl-C came meanwhile. Nothing else is raised: `fault` is the error to report.
        """
        reason = "the step that broke off had begun to change the weights"
        try:
            if self.ranks.count > 1 and self.ranks.agreed is not fault:
                reason = "that takes all ranks, and one broke off alone"
            else:
                reason = self._rescue(recorder) or reason
        except BaseException as failure:  # the fault that ended the run may break this too
            if is_stop(failure):
                raise
            reason = " ".join(str(failure).split()) or type(failure).__name__
        with suppress(Exception):
            self._say_where_it_resumes(reason)

    def _rescue(self, recorder: Recorder) -> str | None:
        """Save the finished step, if it can be; otherwise why it cannot, None where the weights are half-way."""
        if self.unrecorded is not None:
            step, metrics = self.unrecorded

            def log() -> None:
                if recorder.step < step:
                    recorder.log(step, metrics)

            on_first(self.ranks, log)
            self.finish(step)
        if self.finished.step == self._refused_step:
            return "its checkpoint could not be written"
        if set(self.ranks.gather(self.run.updates.begun)) == {self.finished.begun}:
            self.save()
        return None

    def _say_where_it_resumes(self, reason: str) -> None:
        saved, finished = self.saved_step, self.finished.step
        if saved == finished:
            if saved:
                self.console.message(f"step {saved} is saved; {self.how_to_resume()} resumes from there")
            return
        then = f"resumes from step {saved}" if saved else "starts over"
        self.console.warn(f"step {finished} is not saved ({reason}); {self.how_to_resume()} {then}")
