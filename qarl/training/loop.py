"""The RL step, and the loop around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from qarl.config import Config
from qarl.diagnostics.mismatch import mismatch_metrics
from qarl.objectives import Segments
from qarl.training.batch import Batch, build_batch
from qarl.training.checkpoint import CheckpointStore
from qarl.training.console import RunConsole
from qarl.training.interrupt import Interrupted, InterruptGuard
from qarl.training.metrics import (
    Clock,
    changed_codes,
    peak_memory_gib,
    response_metrics,
    reward_metrics,
    rollout_rows,
)
from qarl.training.recorder import Recorder, read_metrics
from qarl.training.rundir import RunDirectory
from qarl.training.setup import Run, build_run
from qarl.training.state import capture, restore
from qarl.types import Prompt, Rollout


def train(config: Config) -> int:
    """Run `config` to its last step. Returns the exit code: 0 done, 130 or 143 stopped by a signal with a checkpoint.

    Raises UserError for whatever the user can fix; steps finished before it are in the run directory.
    """
    console = RunConsole(config.logging.console, config.train.steps)
    with console, InterruptGuard(console.warn) as guard:
        run = build_run(config, console)
        try:
            with RunDirectory.open(config, config.checkpoint.resume) as directory:
                for change in directory.environment_changes:
                    console.warn(change)
                code = Loop(config, run, directory, console, guard).run_all()
        except Interrupted as stop:  # before the first step: there is nothing to save
            return stop.exit_code
        finally:
            run.close()
    if code == 0:
        console.summary(config.run_dir, read_metrics(config.run_dir / "metrics.jsonl"), next_commands(config))
    return code


class Loop:
    """One run's steps, its checkpoints and its records."""

    def __init__(
        self, config: Config, run: Run, directory: RunDirectory, console: RunConsole, guard: InterruptGuard
    ) -> None:
        self.config, self.run, self.console, self.guard = config, run, console, guard
        self.path = directory.path
        self.store = CheckpointStore(directory.checkpoints, config.checkpoint.keep_last)
        self.saved_step: int | None = None

    def run_all(self) -> int:
        """All steps that are left. Returns the exit code."""
        config, run = self.config, self.run
        step = self._resume()
        run.engine.publish(run.policy.current)
        with Recorder(self.path, config.logging, config.model_dump(mode="json"), self.console.warn) as recorder:
            recorder.truncate(step)
            position = run.stream.state()
            try:
                while step < config.train.steps:
                    self.guard.check()
                    metrics, rows = self.step(step)
                    step += 1
                    recorder.log(step, metrics)
                    if recorder.rollouts_due(step):
                        recorder.rollouts(step, rows)
                        self.console.samples(step, rows)
                    self.console.step(step, metrics)
                    position = run.stream.state()
                    if step % config.checkpoint.every == 0:
                        self._save(step, position)
            except Interrupted as stop:
                self._save(step, position)
                self.console.message(f"stopped after step {step}, saved; the same command goes on from there")
                return stop.exit_code
            if config.checkpoint.save_final:
                self._save(step, position)
        return 0

    def step(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """One RL step: sample, score, learn, publish. Returns its metrics and a record of each response.

        Until learning starts only the data position has moved, so a signal may end the step there (`Interrupted`).
        """
        config, run, clock = self.config, self.run, Clock()

        prompts = run.stream.next(config.train.prompts_per_step)
        rollouts = self._sample(prompts, step)
        clock.lap("rollout")
        scores = self._score(prompts, rollouts)
        clock.lap("reward")
        self.guard.check()

        batch = build_batch(prompts, rollouts, scores.total, config.objective.advantage)
        published = run.policy.current
        run.engine.sleep()
        with self.console.phase("learner", len(batch) * config.train.epochs) as advance:
            learned = run.learner.learn(batch, step, advance)
        run.engine.wake()
        clock.lap("learner")

        run.engine.publish(run.policy.current)
        clock.lap("publish")

        learner_tokens = learned.pop("learner_tokens")
        metrics = reward_metrics(scores) | response_metrics(rollouts) | learned
        metrics |= mismatch_of(batch) | changed_codes(published, run.policy.current)
        metrics |= clock.metrics(sum(len(r.token_ids) for r in rollouts), learner_tokens)
        metrics["memory/peak_gib"] = peak_memory_gib(run.policy.device)
        return metrics, rollout_rows(prompts, rollouts, scores, batch)

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

    def _score(self, prompts: list[Prompt], rollouts: list[Rollout]):
        by_response = [p for p in prompts for _ in range(self.config.rollout.n)]
        columns = {name: [p.columns[name] for p in by_response] for name in prompts[0].columns}
        with self.console.phase("rewards"):
            scores = self.run.rewards.score([r.text for r in rollouts], [p.text for p in by_response], columns)
        for message in scores.messages[:3]:
            self.console.warn(message)
        if len(scores.messages) > 3:
            self.console.warn(f"and {len(scores.messages) - 3} more failed rewards in this step")
        return scores

    def _resume(self) -> int:
        """The step to go on from; a checkpoint, if there is one to take, is put back."""
        choice = self.config.checkpoint.resume
        found = None
        if choice == "auto":
            found = self.store.latest_valid(self.console.warn)
        elif choice != "never":
            found = self.store.load(Path(choice))
        start = found.step if found else 0
        for step in self.store.discard_after(start):
            self.console.warn(f"checkpoint {step} is later than the one resumed from, and was removed")
        if found is not None:
            restore(self.run, found)
            self.console.message(f"resumed from {found.path} (step {start})")
            self.saved_step = start
        return start

    def _save(self, step: int, position: dict[str, Any]) -> None:
        if step == self.saved_step:
            return
        with self.console.phase("checkpoint"):
            self.store.save(step, *capture(self.run, position))
        self.saved_step = step


def mismatch_of(batch: Batch) -> dict[str, float]:
    """`mismatch/*` of a step: the learner at the rollout's snapshot against what the sampler reported."""
    everything = list(range(len(batch)))
    segments = Segments.from_lengths([len(r) for r in batch.responses])
    device = segments.index.device
    return mismatch_metrics(
        batch.packed(batch.logp_old, everything, device), batch.packed(batch.logp_sampler, everything, device), segments
    )


def next_commands(config: Config) -> list[str]:
    """What a user may want to do with a finished run."""
    commands = [f"head {config.run_dir}/rollouts/*.jsonl"]
    if config.logging.tensorboard:
        commands.append(f"tensorboard --logdir {config.run_dir}/tensorboard")
    return [*commands, f"qarl train {config.run_dir}/config.yaml train.steps={2 * config.train.steps}"]
