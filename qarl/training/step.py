"""The RL step, in the order of the method: sample, score, advantages, log-probs, loss, backward, update, publish.

What only watches (display, clock, signals, diagnostics, records) stands beside it, behind `qarl.training.observer`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qarl.config import Config
from qarl.rewards import RewardPool, RewardResult
from qarl.rollout.engine import RolloutEngine, SamplingParams
from qarl.training.batch import Batch, build_batch
from qarl.training.decisions import minibatch_totals
from qarl.training.learner import Learner
from qarl.training.observer import Observer, Observers
from qarl.training.setup import Run
from qarl.types import Prompt, Rollout


def rl_step(config: Config, run: Run, step: int, watch: Observers) -> None:
    """One step of a run. step: counted from 0; with the seed it decides every draw and shuffle.

    Before the first update only the data's position changes. After `learned` the step is done, whatever becomes of its
    records or of the new version at the sampler.
    """
    policy, engine, learner = run.policy, run.engine, run.learner

    with watch.phase("rollout", config.train.prompts_per_step * run.sampling.n):
        prompts = run.stream.next(config.train.prompts_per_step)
        rollouts = sample(engine, prompts, replace(run.sampling, seed=run.sampling.seed + step), policy.version, watch)
    with watch.phase("reward"):
        scores = score(run.rewards, prompts, rollouts)
    watch.scored(prompts, rollouts, scores)

    advantage = config.objective.advantage
    assert advantage is not None, "a checked configuration says its advantage"
    batch = build_batch(prompts, rollouts, scores.total, advantage, policy.version, policy.device)

    with watch.phase("learner", learner.forwards(len(batch))):
        engine.sleep()
        learn(learner, batch, step, watch)
        watch.learned(batch, learner.metrics(batch))
        engine.wake()

    with watch.phase("publish"):
        engine.publish(policy.current)


def sample(
    engine: RolloutEngine, prompts: list[Prompt], sampling: SamplingParams, version: int, watch: Observer
) -> list[Rollout]:
    """sampling.n responses to each prompt, in order, from policy `version`."""
    before = 0

    def progress(finished: int, tokens: int) -> None:
        nonlocal before
        watch.progress(finished - before)
        before = finished

    return engine.generate(prompts, sampling, version, progress)


def score(rewards: RewardPool, prompts: list[Prompt], rollouts: list[Rollout]) -> RewardResult:
    """The rewards of each rollout, of which there are n for each prompt, in order."""
    asked = [prompt for prompt in prompts for _ in range(len(rollouts) // len(prompts))]
    columns = {name: [prompt.columns[name] for prompt in asked] for name in asked[0].columns}
    texts = [rollout.text for rollout in rollouts]
    return rewards.score(texts, [prompt.text for prompt in asked], columns, [r.token_ids for r in rollouts])


def learn(learner: Learner, batch: Batch, step: int, watch: Observer) -> None:
    """All optimizer steps on one batch; fills its log-probs.

    `logp_old` is the learner at the rollout's snapshot. Before the first update the current parameters *are* that
    snapshot, so the first minibatch takes it from its own forward; the rest is computed beforehand. A minibatch whose
    advantages are all 0 makes no update where that gives exactly no gradient.
    """
    config, train = learner.config, learner.config.train
    learner.begin(step)
    watch.begin(batch)
    for epoch in range(train.epochs):
        minibatches = batch.minibatches(config.minibatch_size, train.seed, step, epoch)
        if epoch == 0:
            later = batch.part([i for minibatch in minibatches[1:] for i in minibatch.indices])
            for part in learner.cut(later):
                with torch.no_grad():
                    learner.logprobs(part)
                watch.progress(len(part))
        for minibatch in minibatches:
            watch.minibatch(minibatch)
            totals = minibatch_totals(minibatch, config.rollout.max_response_length)
            constants = learner.constants(minibatch, watch)
            micro_batches = learner.micro_batches(minibatch)
            for part, gradient in micro_batches:
                with torch.set_grad_enabled(gradient):
                    logps = learner.token_logprobs(part)
                    watch.forward(part, logps)
                    loss, stats = learner.objective(logps, part.advantages, part.segments, totals, constants)
                if gradient:
                    learner.backward(loss)
                learner.totals.add_loss(loss, stats)
                watch.progress(len(part))
            if any(gradient for _, gradient in micro_batches):
                watch.update(learner.update())
