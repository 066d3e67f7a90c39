"""The RL step, and the loop around it."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from qarl.config import Config
from qarl.diagnostics.crossings import crossing_metrics, crossings
from qarl.machine import gpu_bytes
from qarl.policy.device import pick_device
from qarl.policy.load import load_architecture
from qarl.rewards import RewardResult
from qarl.sizes import decide_sizes, keep_sizes
from qarl.storage.names import checkpoint_steps
from qarl.storage.rundir import RunDirectory, begun_configuration
from qarl.storage.runs import read_metrics
from qarl.training.alarms import Alarms
from qarl.training.batch import build_batch
from qarl.training.console import RunConsole
from qarl.training.faults import memory_errors
from qarl.training.interrupt import Interrupted, InterruptGuard
from qarl.training.keeper import Keeper
from qarl.training.metrics import (
    Clock,
    peak_memory_gib,
    response_metrics,
    reward_metrics,
    token_metrics,
)
from qarl.training.noise import quiet_libraries, rewards_logged
from qarl.training.probe import Probe
from qarl.training.recorder import Recorder
from qarl.training.setup import Run, build_run
from qarl.training.trace import Trace, trace_of
from qarl.types import Prompt, Rollout


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
                run = build_run(config, console, rewards_log)
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
                    prompts, rollouts, scores = self.draw(step)
                    due = recorder.rollouts_due(step + 1)
                    metrics, trace = self.learn(step, prompts, rollouts, scores, due)
                    step += 1
                    self.record(step, metrics, trace, rollouts, recorder)
                    if step % config.checkpoint.every == 0:
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

    def draw(self, step: int) -> tuple[list[Prompt], list[Rollout], RewardResult]:
        """Sample and score: the first half of an RL step, which changes nothing but the data position.

        So a signal may end it anywhere (`Interrupted`), and neither a sampler that cannot go on nor a reward that is
        out of order loses a finished step.
        """
        config, run = self.config, self.run
        self.clock = Clock()
        self.guard.check()
        prompts = run.stream.next(config.train.prompts_per_step)
        rollouts = self._sample(prompts, step)
        self.clock.lap("rollout")
        scores = self._score(prompts, rollouts)
        self.clock.lap("reward")
        self.guard.check()
        return prompts, rollouts, scores

    def learn(
        self, step: int, prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult, rollouts_due: bool
    ) -> tuple[dict[str, float], Trace]:
        """Learn: the second half. Returns the step's metrics and what else there is to record.

        Until the first optimizer step the policy is what it was, and a signal may end the step (`Interrupted`).
        """
        config, run, clock = self.config, self.run, self.clock
        metrics = reward_metrics(scores) | response_metrics(rollouts)
        batch = build_batch(prompts, rollouts, scores.total, config.objective.advantage)
        published, skipped = run.policy.current, run.learner.skipped_in_a_row
        due, truncation = config.diagnostics.due(step + 1), run.sampling.truncation
        probe = Probe(
            run.policy,
            run.learner.objective,
            config,
            truncation,
            due,
            bool(due) or rollouts_due,
            run.sampling.stop_token_ids,
        )
        run.engine.sleep()
        with self.console.phase("learner", run.learner.forwards(len(batch))) as advance:

            def progress(responses: int) -> None:
                advance(responses)
                if run.policy.version == published.version and run.learner.skipped_in_a_row == skipped:
                    self.guard.check()

            metrics |= run.learner.learn(batch, step, progress, probe)
            self.learner_tokens = metrics.pop("learner_tokens")
            # From here on the step is done, whatever becomes of its records.
            self.keeper.unrecorded = (step + 1, metrics)
        run.engine.wake()
        clock.lap("learner")
        clock.move(probe.seconds, "learner", "diagnostics")

        crossed = crossings(published, run.policy.current)
        metrics |= token_metrics(batch) | crossing_metrics(crossed) | probe.metrics
        metrics["memory/peak_gib"] = peak_memory_gib(run.policy.device)
        trace = trace_of(batch, prompts, rollouts, scores, rollouts_due, probe, crossed, run.tokenizer.decode)
        clock.lap("diagnostics")
        return metrics, trace

    def record(
        self, step: int, metrics: dict[str, float], trace: Trace, rollouts: list[Rollout], recorder: Recorder
    ) -> None:
        """Publish and record a step that was learned from, which is then finished.

        A sampler that refuses the new version, or a disk the rollouts, is raised only after the step's metrics are
        written: the masters are this step's already.
        """
        failure = self.publish(metrics, rollouts)
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

    def publish(self, metrics: dict[str, float], rollouts: list[Rollout]) -> Exception | None:
        """Hand the new version to the sampler, and complete the step's metrics. Returns what was raised, if anything:
        the step is done all the same."""
        failure = None
        try:
            self.run.engine.publish(self.run.policy.current)
        except Exception as error:
            failure = error
        self.clock.lap("publish")
        tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        metrics |= self.clock.metrics(tokens, self.learner_tokens) | self.run.engine.metrics
        return failure

    def _sample(self, prompts: list[Prompt], step: int) -> list[Rollout]:
        run, finished = self.run, 0
        sampling = replace(run.sampling, seed=run.sampling.seed + step)
        with self.console.phase("rollout", len(prompts) * sampling.n) as advance:

            def progress(done: int, tokens: int) -> None:
                nonlocal finished
                self.guard.check()
                advance(done - finished)
                finished = done

            return run.engine.generate(prompts, sampling, run.policy.version, progress)

    def _score(self, prompts: list[Prompt], rollouts: list[Rollout]) -> RewardResult:
        by_response = [p for p in prompts for _ in range(self.config.rollout.n)]
        columns = {name: [p.columns[name] for p in by_response] for name in prompts[0].columns}
        with self.console.phase("rewards"):
            scores = self.run.rewards.score(
                [r.text for r in rollouts], [p.text for p in by_response], columns, [r.token_ids for r in rollouts]
            )
        for message in scores.messages[:3]:
            self.console.warn(message)
        if len(scores.messages) > 3:
            self.console.warn(f"and {len(scores.messages) - 3} more failed rewards in this step, see rewards.log")
        return scores


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
