"""A training run: the loop around the RL step, its checkpoints and its records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from qarl.batch.observer import Observer, Observers
from qarl.config import Config
from qarl.config.yaml_io import parse_yaml
from qarl.diagnostics.agreement import Agreement
from qarl.diagnostics.probe import Probe
from qarl.distributed.group import connect
from qarl.distributed.ranks import Ranks
from qarl.distributed.together import together
from qarl.errors import UserError, memory_errors
from qarl.inputs.code import describe
from qarl.memory.sizes import decide_sizes, keep_sizes
from qarl.policy.device import rank_device
from qarl.policy.load_config import load_architecture
from qarl.rollout.shared import publish_together
from qarl.storage.disk import disk_errors
from qarl.storage.rundir import RunDirectory, begun_configuration
from qarl.storage.runs import METRICS, read_metrics
from qarl.terminal.noise import quiet_libraries, rewards_logged
from qarl.terminal.run_console import RunConsole, StepDisplay, next_commands
from qarl.training.alarms import Alarms, idle_correction
from qarl.training.checkpoint_manager import CheckpointManager, refuse_vanished
from qarl.training.interrupt import InterruptGuard, SafePoints
from qarl.training.metrics import Clock, over_ranks
from qarl.training.profiler import StepProfiler
from qarl.training.recorder import NoRecords, Recorder
from qarl.training.setup import Run, build_run
from qarl.training.step import rl_step
from qarl.training.step_record import StepRecord
from qarl.utils.machine import gpu_bytes
from qarl.utils.signals import Interrupted, StoppedAtOnce

MEMORY_FIX = (
    "lower train.micro_batch_tokens, rollout.max_num_seqs or rollout.kv_cache_tokens, set train.recompute: layer, or "
    "take a larger machine; `qarl check` estimates what a run needs"
)


def train(config: Config) -> int:
    """Run the training of `config` to its last step.

    If a launcher started this process as one of several ranks, they train together; the first rank writes the run
    directory and the console. A new run that fails before its first step leaves no run directory. After a later
    exception the run directory has all finished steps.

    Args:
        config: A checked configuration.

    Returns:
        The exit code: 0 if the last step is recorded; 129, 130 or 143 if a signal stopped the run with a checkpoint.

    Raises:
        UserError: A problem that the user can fix. User code that ends the process (`sys.exit`) is one of them.
        OtherRankFailed: Another rank failed.
        StoppedAtOnce: A second Ctrl-C arrived; the current step is not saved.
    """
    device = rank_device(config.model.device)
    try:
        with connect(config, device) as ranks:
            return _train(config, device, ranks)
    except Interrupted as stop:  # only this rank was interrupted; leaving `connect` stopped the others
        return stop.exit_code


def _train(config: Config, device: torch.device, ranks: Ranks) -> int:
    console = RunConsole(config.logging.console if ranks.first else "none", config.train.steps)
    guard = InterruptGuard(console.warn, ranks)
    with memory_errors(MEMORY_FIX), early_ends(), console, quiet_libraries(console.warn), guard:
        try:
            config = with_sizes(config, device, ranks)
            with RunDirectory.open(config, config.checkpoint.resume, ranks) as directory:
                ranks.log_in(directory.path)
                console.message(
                    f"{config.model.path}, {config.quant.label} ({config.quant.learner} learner), "
                    f"{config.objective.name}: {config.train.steps} steps in {directory.path}"
                )
                refuse_vanished(config.checkpoint.resume, directory, ranks)
                rewards_log = log_directory(directory.path, ranks) / "rewards.log"
                run = build_run(config, device, console, rewards_log, ranks)
                try:
                    objective = run.learner.objective
                    with rewards_logged(rewards_log):
                        code = Loop(config, run, directory, console, guard).run_all()
                except BaseException:
                    with suppress(Exception):  # report the first error, not one of closing
                        run.close()
                    raise
                run.close()
        except Interrupted as stop:
            console.message("stopped during startup: nothing to save; rerun the same command")
            if ranks.count > 1:  # the others may be at any point, so `connect` must stop them
                raise
            return stop.exit_code
    if code == 0 and ranks.first:
        history = read_metrics(config.run_dir / METRICS)
        last = int(history[-1]["step"]) if history else 0
        if last < config.train.steps:  # exit code 0 promises the last step
            raise UserError(
                f"{config.run_dir / METRICS}: ends with step {last}, not with train.steps = {config.train.steps}: the "
                "file was changed during the run; run the same command again"
            )
        if idle := idle_correction(config, objective, history):
            console.warn(idle)
        console.summary(config.run_dir, history, next_commands(config, ranks.count))
    return code


@contextmanager
def early_ends() -> Iterator[None]:
    """Turn exceptions that would end the process without an error, such as SystemExit(0), into a UserError.

    Only code that a run calls raises them: an objective, a tracker, a library. Exceptions of signal handlers pass.
    """
    try:
        yield
    except (Exception, Interrupted, StoppedAtOnce):
        raise
    except BaseException as error:
        raise UserError(
            f"train: code that the run calls raised {describe(error)}, which would end the process before the last "
            "step; raise an ordinary exception there, or none"
        ) from error


def with_sizes(config: Config, device: torch.device, ranks: Ranks) -> Config:
    """Return the configuration with a number for every size that is null, such as `train.micro_batch_tokens`.

    A run that has begun keeps its sizes. All ranks use the sizes of the first rank.
    """

    def sized() -> Config:
        kept = keep_sizes(config, begun_configuration(config.run_dir))
        if device.type == "cpu":
            return decide_sizes(kept, "cpu")
        return decide_sizes(kept, "cuda", load_architecture(kept.model), gpu_bytes(), ranks.count)

    own = together(ranks, sized)
    first = ranks.gather(own.to_yaml())[0]
    return own if ranks.first else Config.model_validate(parse_yaml(first, "configuration"))


def log_directory(run_dir: Path, ranks: Ranks) -> Path:
    """Return the directory for logs of a rank's reward workers and sampler; the run directory for the first rank."""
    if ranks.first:
        return run_dir
    folder = run_dir / f"rank-{ranks.rank:03d}"
    with disk_errors(folder):
        folder.mkdir(exist_ok=True)
    return folder


class Loop:
    """Runs the steps of one run and writes its checkpoints and records. All ranks run the steps; the first one records.

    A step is finished once its line is in metrics.jsonl. The line is written after all other files of the step and
    before a checkpoint of it, so metrics.jsonl is never behind a checkpoint.
    """

    def __init__(
        self, config: Config, run: Run, directory: RunDirectory, console: RunConsole, guard: InterruptGuard
    ) -> None:
        self.config, self.run, self.directory, self.console, self.guard = config, run, directory, console, guard
        self.ranks = run.learner.ranks
        self.checkpoints = CheckpointManager(config.checkpoint, run, directory, console)
        self.alarms = Alarms(config, run.learner.objective, console.warn)
        self.agreement = Agreement(config, run.policy, console.warn)

    def run_all(self) -> int:
        """Run all remaining steps.

        Before any exception leaves this method, the finished steps are saved; see `CheckpointManager.rescue`. Only a
        second Ctrl-C stops without saving.

        Returns:
            The exit code of the run: 0, or 128 + the number of the signal that stopped it.
        """
        config, run, checkpoints, ranks = self.config, self.run, self.checkpoints, self.ranks
        step = checkpoints.resume()
        for line in run.evaluation.check(self.directory.path, step):
            self.console.warn(line)
        with self.console.phase("sampler"):
            publish_together(run.engine, run.policy.current, ranks, config.rollout)
        with together(ranks, self.recorder) as recorder:
            for change in self.directory.begin(run.inputs.record(), checkpoints.history):
                self.console.warn(f"since the last start {change}")
            together(ranks, lambda: recorder.truncate(step))
            run.evaluation.begin(self.directory.path, step)
            self.guard.defer()
            checkpoints.finish(step)
            try:
                while True:
                    self.evaluate(step, recorder)
                    if step >= config.train.steps:
                        break
                    self.take(step, recorder)
                    step += 1
                    if step % config.checkpoint.every == 0:
                        checkpoints.save()
                if config.checkpoint.save_final:
                    checkpoints.save()
                run.updates.finish()
            except Interrupted as stop:
                checkpoints.save()
                saved = f"stopped after step {step}, saved; {checkpoints.how_to_resume()} resumes from there"
                nothing = "stopped in step 1: nothing to save; rerun the same command to start over"
                self.console.message(saved if step else nothing)
                return stop.exit_code
            except StoppedAtOnce:
                raise
            except BaseException as fault:  # also SystemExit, which user code may raise: finished steps must be saved
                checkpoints.rescue(recorder, fault)
                raise
        return 0

    def recorder(self) -> Recorder:
        """Return the recorder of this rank; only that of the first rank writes files."""
        logging = self.config.logging
        if not self.ranks.first:
            return NoRecords(logging)
        return Recorder(self.directory.path, logging, self.config.model_dump(mode="json"), self.console.warn)

    def evaluate(self, step: int, recorder: Recorder) -> None:
        """Run the evaluation due after `step`, if any. It changes no saved state, so a signal may stop it anywhere."""
        run = self.run
        if not run.evaluation.due(step):
            return
        if step == self.config.train.steps and self.config.checkpoint.save_final:
            self.checkpoints.save()  # first, since an evaluation may take long
        run.evaluation.at(step, run.engine, run.policy, self.console, self.guard.check, recorder.track)

    def take(self, step: int, recorder: Recorder) -> None:
        """Run one RL step with its observers, and write its records.

        If publishing fails, the step's records are written before the error is raised, because the master weights are
        already those after the step.

        Args:
            step: Step number, counted from 0.
            recorder: Writes the records.
        """
        config, run, checkpoints = self.config, self.run, self.checkpoints
        due = config.diagnostics.due(step + 1)
        rollouts_due = recorder.rollouts_due(step + 1) and not config.given
        objective, truncation, stop = run.learner.objective, run.sampling.truncation, run.sampling.stop_token_ids
        clock = Clock()
        probe = Probe(run.policy, objective, config, truncation, due, bool(due) or rollouts_due, stop, self.ranks)
        record = StepRecord(run, probe, rollouts_due, lambda metrics: checkpoints.learned(step + 1, metrics))
        # The record comes last: it needs the probe's results, and its hook marks the step as learned.
        observers: list[Observer] = [
            clock,
            StepDisplay(self.console),
            SafePoints(self.guard),
            probe,
            *([self.agreement] if self.ranks.first else []),
            record,
        ]
        if self.ranks.first and config.train.profile is not None and config.train.profile.step == step + 1:
            shape = load_architecture(config.model)
            # First, so that the time to write its files is not counted in a phase.
            observers.insert(0, StepProfiler(self.directory.path / "profile", step + 1, run, shape))
        watch = Observers(observers)
        failure: Exception | None = None
        try:
            rl_step(config, run, step, watch)
        except Exception as error:
            if record.trace is None:
                raise
            failure = error
        clock.move(watch.seconds["learner"], "learner", "diagnostics")
        sampled = None if config.given or config.rollout.replay is not None else record.rollout_tokens
        record.metrics |= clock.metrics(sampled, run.learner.totals.forward_tokens) | run.engine.metrics
        record.metrics |= over_ranks(record.metrics, self.ranks)
        self.record(step + 1, record, recorder, failure)

    def record(self, step: int, record: StepRecord, recorder: Recorder, failure: Exception | None) -> None:
        """Write the records of a step after the learner's last update, and mark the step as finished.

        Args:
            step: Step number, counted from 1.
            record: Metrics and trace of the step.
            recorder: Writes the records.
            failure: Error that was raised after the learner's last update, or None.

        Raises:
            Exception: `failure`, or an error of writing the trace. Raised after the step's metrics are written.
        """
        trace, metrics = record.trace, record.metrics
        assert trace is not None, "a learned step has a trace"
        try:
            trace.write(step, metrics, recorder)
        except Exception as error:
            failure = failure or error

        def log() -> None:
            try:
                recorder.log(step, metrics)
            except Exception as error:
                raise failure or error from None

        together(self.ranks, log)
        self.checkpoints.finish(step)
        self.ranks.all_agree(failure)
        if trace.rows is not None:
            self.console.samples(step, trace.rows[:: self.config.rollout.n])  # one response per prompt
        self.console.step(step, metrics)
        if self.ranks.first:
            self.alarms.step(step, metrics)
