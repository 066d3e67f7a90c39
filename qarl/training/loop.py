"""A training run: the loop around the RL step, its checkpoints and its records."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from qarl.config import Config
from qarl.diagnostics.agreement import Agreement
from qarl.diagnostics.probe import Probe
from qarl.machine import gpu_bytes
from qarl.policy.device import pick_device
from qarl.policy.load import load_architecture
from qarl.sizes import decide_sizes, keep_sizes
from qarl.storage.names import checkpoint_steps
from qarl.storage.rundir import RunDirectory, begun_configuration
from qarl.storage.runs import read_metrics
from qarl.training.alarms import Alarms
from qarl.training.console import RunConsole
from qarl.training.decisions import save_is_due
from qarl.training.display import StepDisplay
from qarl.training.faults import memory_errors
from qarl.training.interrupt import Interrupted, InterruptGuard, SafePoints
from qarl.training.keeper import Keeper
from qarl.training.metrics import Clock
from qarl.training.noise import quiet_libraries, rewards_logged
from qarl.training.observer import Observer, Observers
from qarl.training.profiler import StepProfiler
from qarl.training.recorder import Recorder
from qarl.training.setup import Run, build_run
from qarl.training.step import rl_step
from qarl.training.step_record import StepRecord


def train(config: Config) -> int:
    """Run `config` to its last step. Returns the exit code: 0 done, 130 or 143 stopped by a signal with a checkpoint.

    Raises UserError for whatever the user can fix. Refused before its first step, a new run leaves no directory;
    later, the steps finished before it are in the run directory, as they are after any other exception.
    """
    config = with_sizes(config)
    console = RunConsole(config.logging.console, config.train.steps)
    with memory_errors(), console, quiet_libraries(console.warn), InterruptGuard(console.warn) as guard:
        try:
            with RunDirectory.open(config, config.checkpoint.resume) as directory:
                console.message(
                    f"{config.model.path}, {config.quant.scheme} ({config.quant.learner} learner), "
                    f"{config.objective.name}: {config.train.steps} steps in {directory.path}"
                )
                rewards_log = directory.path / "rewards.log"
                run = build_run(config, pick_device(config.model.device), console, rewards_log)
                try:
                    with rewards_logged(rewards_log):
                        code = Loop(config, run, directory, console, guard).run_all()
                except BaseException:
                    with suppress(Exception):  # the first fault is the one to tell
                        run.close()
                    raise
                run.close()
        except Interrupted as stop:
            console.message("stopped before a step of this start: nothing to save, the same command starts again")
            return stop.exit_code
    if code == 0:
        console.summary(config.run_dir, read_metrics(config.run_dir / "metrics.jsonl"), next_commands(config))
    return code


def with_sizes(config: Config) -> Config:
    """The configuration with a number for each size that is left to the device: the run's own where it has begun."""
    config = keep_sizes(config, begun_configuration(config.run_dir))
    if pick_device(config.model.device).type == "cpu":
        return decide_sizes(config, "cpu")
    return decide_sizes(config, "cuda", load_architecture(config.model), gpu_bytes())


class Loop:
    """One run's steps, its checkpoints and its records.

    A step is finished once its line is in metrics.jsonl, which comes after everything else it leaves; a checkpoint of
    it comes later still, so that metrics.jsonl is never behind one.
    """

    def __init__(
        self, config: Config, run: Run, directory: RunDirectory, console: RunConsole, guard: InterruptGuard
    ) -> None:
        self.config, self.run, self.directory, self.console, self.guard = config, run, directory, console, guard
        self.keeper = Keeper(config.checkpoint, run, directory, console)
        self.alarms = Alarms(config, run.learner.objective, console.warn)
        self.agreement = Agreement(config, run.policy, console.warn)

    def run_all(self) -> int:
        """All steps that are left. Returns the exit code.

        Whatever is raised, what is finished is saved first; see `Keeper.rescue`.
        """
        config, run, keeper = self.config, self.run, self.keeper
        step = keeper.resume()
        with self.console.phase("sampler"):
            run.engine.publish(run.policy.current)
        with Recorder(
            self.directory.path, config.logging, config.model_dump(mode="json"), self.console.warn
        ) as recorder:
            for change in self.directory.begin(run.inputs, keeper.history):
                self.console.warn(f"since the last start {change}")
            recorder.truncate(step)
            run.evaluation.begin(self.directory.path, step)
            self.guard.defer()
            keeper.finish(step)
            try:
                while True:
                    self.evaluate(step, recorder)
                    if step >= config.train.steps:
                        break
                    self.take(step, recorder)
                    step += 1
                    if save_is_due(step, config.checkpoint):
                        keeper.save()
                if config.checkpoint.save_final:
                    keeper.save()
            except Interrupted as stop:
                keeper.save()
                self.console.message(f"stopped after step {step}, saved; {keeper.how_to_go_on()} goes on from there")
                return stop.exit_code
            except Exception:
                keeper.rescue(recorder)
                raise
        return 0

    def evaluate(self, step: int, recorder: Recorder) -> None:
        """The evaluation that is due after `step`, if any. It changes nothing: a signal may end it anywhere."""
        run = self.run
        if not run.evaluation.due(step):
            return
        if step == self.config.train.steps and self.config.checkpoint.save_final:
            self.keeper.save()  # first, since an evaluation may take long
        run.evaluation.at(step, run.engine, run.policy, self.console, self.guard.check, recorder.track)

    def take(self, step: int, recorder: Recorder) -> None:
        """One RL step, with what watches it, and its records. step: counted from 0.

        A sampler that refuses the new version is raised only after the step's records are written: the masters are
        this step's already.
        """
        config, run, keeper = self.config, self.run, self.keeper
        due, rollouts_due = config.diagnostics.due(step + 1), recorder.rollouts_due(step + 1)
        objective, truncation, stop = run.learner.objective, run.sampling.truncation, run.sampling.stop_token_ids
        clock = Clock()
        probe = Probe(run.policy, objective, config, truncation, due, bool(due) or rollouts_due, stop)
        record = StepRecord(run, probe, rollouts_due, lambda metrics: keeper.learned(step + 1, metrics))
        # The profiler comes first: what it writes at the end is no phase's time. The record comes last: it takes the
        # probe's numbers, and once it is told the step counts as learned from.
        watching: list[Observer] = [
            clock,
            StepDisplay(self.console),
            SafePoints(self.guard),
            probe,
            self.agreement,
            record,
        ]
        if config.train.profile is not None and config.train.profile.step == step + 1:
            shape = load_architecture(config.model)
            watching.insert(0, StepProfiler(self.directory.path / "profile", step + 1, run, shape))
        watch = Observers(watching)
        failure: Exception | None = None
        try:
            rl_step(config, run, step, watch)
        except Exception as error:
            if record.trace is None:
                raise
            failure = error
        clock.move(watch.seconds["learner"], "learner", "diagnostics")
        tokens = record.rollout_tokens, run.learner.totals.forward_tokens
        record.metrics |= clock.metrics(*tokens) | run.engine.metrics
        self.record(step + 1, record, recorder, failure)

    def record(self, step: int, record: StepRecord, recorder: Recorder, failure: Exception | None) -> None:
        """Write down a step that was learned from, which is then finished. step: counted from 1.

        failure: what ended the step after it was learned from, or None. It, or a disk that refuses the rollouts, is
        raised once the step's metrics are written.
        """
        trace, metrics = record.trace, record.metrics
        assert trace is not None, "a step that was learned from has its trace"
        try:
            trace.write(step, metrics, self.config, recorder)
        except Exception as error:
            failure = failure or error
        try:
            recorder.log(step, metrics)
        except Exception as error:
            raise failure or error from None
        self.keeper.finish(step)
        if failure is not None:
            raise failure
        if trace.rows is not None:
            self.console.samples(step, trace.rows[:: self.config.rollout.n])  # one of each prompt
        self.console.step(step, metrics)
        self.alarms.step(step, metrics)


def next_commands(config: Config) -> list[tuple[str, str]]:
    """What a user may want to do with a finished run: (what for, command). Each is a line for the shell."""
    directory = shlex.quote(str(config.run_dir))
    # The programs beside this Python, spelled out where the shell would not find them (make's .venv is not activated).
    programs = Path(sys.executable).parent
    if programs.is_relative_to(Path.cwd()):
        programs = programs.relative_to(Path.cwd())
    python, board, qarl = (
        n if shutil.which(n) else shlex.quote(str(programs / n)) for n in ("python", "tensorboard", "qarl")
    )
    commands = []
    last = config.train.steps - config.train.steps % config.logging.rollouts_every
    if last:
        answers = f"{directory}/rollouts/{last:06d}.jsonl"
        commands.append(("to read its answers:", f"{python} -m json.tool --json-lines {answers}"))
    if config.logging.tensorboard:
        commands.append(("to see its curves:", f"{board} --logdir {directory}/tensorboard"))
    commands.append(("to see it on a page:", f"{qarl} report {directory}"))
    if checkpoint_steps(config.run_dir / "checkpoints"):
        commands.append(("to export it:", f"{qarl} export {directory}"))
    other = _other_scheme(config)
    out = shlex.quote(f"{config.run_dir}-compare")
    schemes = f"--schemes {config.quant.scheme},{other} --reuse {directory} --out {out}"
    commands.append((f"to compare with {other}:", f"{qarl} compare {directory}/config.yaml {schemes}"))
    more = f"{qarl} train {directory}/config.yaml train.steps={2 * config.train.steps}"
    return [*commands, ("to train it further:", more)]


def _other_scheme(config: Config) -> str:
    """What a run is first compared with: full precision, and where it is that, or cannot be, 8 bits."""
    unquantized = config.quant.scheme != "bf16" and config.quant.learner != "fake_quant"
    return "bf16" if unquantized else "fp8" if config.quant.scheme == "w8a8" else "w8a8"
