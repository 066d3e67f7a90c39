"""Checkpoints during a run: resuming, saving finished steps, and saving after an error."""

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
from qarl.storage.loading import load_checkpoint
from qarl.storage.names import checkpoint_steps
from qarl.storage.rundir import RunDirectory
from qarl.terminal.run_console import RunConsole
from qarl.training.recorder import Recorder
from qarl.training.setup import Run
from qarl.training.state import capture, restore
from qarl.utils.signals import is_stop
from qarl.utils.text import one_line


@dataclass(frozen=True)
class Finished:
    """State of a finished step that a checkpoint stores beside master weights and optimizer.

    Attributes:
        step: Number of the step.
        position: `PromptStream.state` after the step.
        skipped: `Learner.skipped_in_a_row`.
        begun: `Updates.begun` after the step. If it has grown since, the master weights belong to a later step.
        loss_scale: `LossScale.state`.
    """

    step: int
    position: dict[str, Any]
    skipped: int
    begun: int
    loss_scale: dict[str, Any]


def refuse_vanished(resume: str, directory: RunDirectory, ranks: Ranks) -> None:
    """Check, before anything is loaded, that a run which has taken steps still has a checkpoint. A collective.

    Args:
        resume: Value of `checkpoint.resume`.
        directory: The run directory.
        ranks: All ranks of the run.

    Raises:
        UserError: The run has taken steps but its checkpoints are gone; see `RunDirectory.history_at`.
    """
    if resume == "auto" and not ranks.gather(checkpoint_steps(directory.checkpoints))[0]:
        directory.history_at(0, own=False)


class CheckpointManager:
    """Resumes, saves and rescues one run.

    Call `resume` first, then `finish` after every step. Every rank has a manager, and all ranks call `resume`, `save`
    and `rescue` together.

    Attributes:
        unrecorded: (step, metrics so far) of a step that has updated the weights but is not in metrics.jsonl yet.
    """

    def __init__(self, config: CheckpointConfig, run: Run, directory: RunDirectory, console: RunConsole) -> None:
        self.config, self.run, self.directory, self.console = config, run, directory, console
        self.ranks = run.learner.ranks
        self.store = CheckpointStore(directory.checkpoints, config.keep_last, self.ranks)
        self.history = History()
        self.saved_step = 0  # a new run has nothing to save before its first step
        self.unrecorded: tuple[int, dict[str, float]] | None = None
        self._refused_step = 0  # last step whose checkpoint could not be written

    def resume(self) -> int:
        """Restore the configured checkpoint, if any, and remove later ones.

        Returns:
            The step to continue from; 0 for a new run.

        Raises:
            UserError: Files of the run are missing or its inputs have changed. The directory is left as it was.
        """
        found = None
        if self.config.resume == "auto":
            found = self.store.latest_valid(self.console.warn)
        elif self.config.resume != "never":
            found = load_checkpoint(Path(self.config.resume).expanduser(), ranks=self.ranks)
        if found is None:
            self.history = self.directory.history_at(0, own=False)
            return 0
        own = found.path == self.store.path(found.step).resolve()  # False for another run's checkpoint
        self.history = self.directory.history_at(found.step, own)
        for change in restore(self.run, found, self.config.allow_changed):
            self.console.warn(change)
        for step in self.store.discard_after(found.step):
            self.console.warn(f"removed checkpoint {step}, which is later than the resumed one")
        if own:
            self.saved_step = found.step
        self.console.message(f"resumed from {found.path} (step {found.step})")
        return found.step

    def how_to_resume(self) -> str:
        """Return the command that resumes the run, as text for a message."""
        same = "the same command"
        return same if self.config.resume == "auto" else f"{same} with checkpoint.resume=auto"

    def learned(self, step: int, metrics: dict[str, float]) -> None:
        """Record that the weights are those after `step`, whose metrics are not on disk yet.

        Args:
            step: Number of the step.
            metrics: Its metrics so far; the caller keeps adding to this dictionary.
        """
        self.unrecorded = step, metrics

    def finish(self, step: int) -> None:
        """Record that `step` is complete and its metrics are on disk."""
        run = self.run
        self.unrecorded = None
        if run.source is not None:
            run.source.finish()
        learner, updates = run.learner, run.updates
        state = run.stream.state(), learner.skipped_in_a_row, updates.begun, updates.scale.state()
        self.finished = Finished(step, *state)

    def save(self) -> None:
        """Write a checkpoint of the finished step unless it already has one. A collective.

        Raises:
            UserError: The checkpoint cannot be written.
        """
        finished = self.finished
        if finished.step == self.saved_step:
            return
        assert self.run.updates.begun == finished.begun, "the master weights belong to a later step"
        self.run.learner.skipped_in_a_row = finished.skipped
        self.run.updates.scale.load(finished.loss_scale)
        self._refused_step = finished.step
        with self.console.phase("checkpoint"):
            self.store.save(finished.step, *capture(self.run, finished.position))
        self.saved_step, self._refused_step = finished.step, 0
        self.history = self.history.model_copy(update={"checkpoint": finished.step})
        on_first(self.ranks, lambda: write_history(self.directory.path, self.history))

    def rescue(self, recorder: Recorder, fault: BaseException) -> None:
        """Save the finished step after an exception, and print where the run resumes.

        If the learner has begun an optimizer step, the master weights are between two steps and the previous checkpoint
        is kept. If a step only lacks its metrics, it is finished here with the metrics known so far.

        With several ranks, saving is a collective, so it is attempted only if all ranks raised together
        (`Ranks.all_agree`). If one rank raised alone, a collective would hang.

        Args:
            recorder: Writes the metrics of a step that lacks them.
            fault: The exception that ended the run.

        Raises:
            StoppedAtOnce: A second Ctrl-C arrived. No other exception is raised; `fault` is the error to report.
        """
        reason = "the interrupted step had already changed the weights"
        try:
            if self.ranks.count > 1 and self.ranks.agreed is not fault:
                reason = "saving needs all ranks, and one rank failed alone"
            else:
                reason = self._rescue(recorder) or reason
        except BaseException as failure:  # the cause of `fault`, such as a full disk, may also prevent saving
            if is_stop(failure):
                raise
            reason = one_line(failure)
        with suppress(Exception):
            self._report_resume_step(reason)

    def _rescue(self, recorder: Recorder) -> str | None:
        """Save the finished step unless the weights are between two steps.

        Returns:
            The reason if an earlier attempt to write this checkpoint failed, else None.
        """
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

    def _report_resume_step(self, reason: str) -> None:
        saved, finished = self.saved_step, self.finished.step
        if saved == finished:
            if saved:
                self.console.message(f"step {saved} is saved; {self.how_to_resume()} resumes from there")
            return
        then = f"resumes from step {saved}" if saved else "starts over"
        self.console.warn(f"step {finished} is not saved ({reason}); {self.how_to_resume()} {then}")
