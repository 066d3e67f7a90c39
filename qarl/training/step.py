"""The RL step in the order of the method: sample, score, advantages, log-probs, loss, backward, update, publish.

Display, clock, signals, diagnostics and records are observers (`qarl.training.observer`).

On several ranks, each samples and scores its share of the prompts. Then all of them have the whole batch, split it in
the same way, and run their share of the micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qarl.config import Config
from qarl.distributed.together import together
from qarl.rewards import RewardResult
from qarl.rewards.shared import gather_results, score_share
from qarl.rollout.engine import round_seed
from qarl.rollout.shared import asleep, gather_rollouts, generate_share, publish_together
from qarl.training.batch import Batch, build_batch
from qarl.training.dynamic_sampling import Sampled, sample_until_full
from qarl.training.learner import Learner
from qarl.training.observer import Observer, Observers
from qarl.training.setup import Run
from qarl.types import Prompt, Rollout

if TYPE_CHECKING:
    from qarl.rollout.asynchronous.engine import AsyncEngine
    from qarl.training.local_engine import LocalEngine


def rl_step(config: Config, run: Run, step: int, watch: Observers) -> None:
    """Run one step. step: counted from 0; with the seed it decides every sampled token and shuffle.

    Before the first update only the position in the data changes. After `learned` the step is done, even if its records
    or the publish fail.
    """
    policy, learner = run.policy, run.learner
    prompts, rollouts, scores = sample(config, run, step, watch)
    watch.scored(prompts, rollouts, scores)

    objective, replays = config.objective, config.model.routing == "replay"
    how = objective.advantage, policy.version, policy.device, replays, objective.mask_truncated, config.learns_stale
    batch = build_batch(prompts, rollouts, scores.total, *how, given=config.given)

    with (
        watch.phase("learner", learner.forwards(len(batch))),
        asleep(run.engine, learner, learner.ranks, config.rollout),
    ):
        learn(learner, batch, step, watch)
        watch.learned(batch, learner.metrics(batch))

    with watch.phase("publish"):
        publish_together(run.engine, policy.current, learner.ranks, config.rollout)
        if run.ahead is not None:
            run.ahead.fill(step + 1)


def sample(config: Config, run: Run, step: int, watch: Observers) -> Sampled:
    """Sample and score the step's prompts: once, or until enough groups have rewards that differ."""

    def once(prompts: int, number: int = 0) -> Sampled:
        if run.ahead is not None:
            found = take(config, run.ahead, prompts, step, watch, number)
        else:
            asked = run.stream.next(prompts)
            found = Sampled(asked, *sample_and_score(config, run, asked, step, watch, number))
        run.stream.record_rewards(found.prompts, found.scores.total)
        return found

    dynamic, wanted = config.rollout.dynamic_sampling, config.train.prompts_per_step
    if dynamic is None:
        return once(wanted)
    sampled, metrics = sample_until_full(dynamic, wanted, once)
    watch.sampled(metrics)
    return sampled


def take(
    config: Config, ahead: AsyncEngine | LocalEngine, prompts: int, step: int, watch: Observers, number: int = 0
) -> Sampled:
    """Take the next groups of responses from asynchronous rollouts, a recorded run or the data, with their scores.

    number: of the round of dynamic sampling. Later rounds only ask for the groups that they take: what a whole step
    needs would be left over for the next step, and be too old for `max_staleness`.
    """
    with watch.phase("rollout", prompts * config.rollout.n):
        if number == 0:
            ahead.fill(step)
        sampled = Sampled(*ahead.take(prompts, step, lambda: watch.progress(0)))
    with watch.phase("reward", None):  # computed meanwhile; readers of the phases' times expect it
        return sampled


def sample_and_score(
    config: Config, run: Run, prompts: list[Prompt], step: int, watch: Observers, number: int = 0
) -> tuple[list[Rollout], RewardResult]:
    """Sample n responses per prompt from the published policy and score them; each rank does its share.

    number: of the round of dynamic sampling.
    """
    ranks = run.learner.ranks
    samplers = config.rollout.samplers(ranks.count)
    record = config.records_routing_at(step + 1)
    seed = round_seed(run.sampling.seed + step, number)
    sampling = replace(run.sampling, seed=seed, record_routing=record)
    before = 0

    def progress(finished: int, tokens: int) -> None:
        nonlocal before
        watch.progress(finished - before)
        before = finished

    def own_share() -> tuple[list[Rollout], RewardResult]:
        with watch.phase("rollout", len(ranks.share(len(prompts), samplers)) * sampling.n):
            rollouts = generate_share(run.engine, prompts, sampling, run.policy.version, progress, ranks, samplers)
        with watch.phase("reward"):
            return rollouts, score_share(run.rewards, prompts, rollouts, ranks, samplers)

    rollouts, scores = together(ranks, own_share, config.rollout.restarts_s)
    if ranks.count > 1:
        with watch.phase("gather", None):
            return gather_rollouts(rollouts, ranks), gather_results(scores, ranks, config.reward.max_failed_frac)
    return rollouts, scores


def learn(learner: Learner, batch: Batch, step: int, watch: Observer) -> None:
    """Run all optimizer steps on one batch, and fill its log-probs.

    `logp_old` is the learner at the rollout's weights. Before the first update the current weights are those, so the
    first minibatch takes it from its training forward, and the others get a separate forward in advance. So do
    responses of asynchronous rollouts with tokens of earlier versions, one forward per version. A minibatch whose
    responses all have advantage 0 makes no update if that gives exactly no gradient. On several ranks,
    micro-batches run in rounds; a rank without one in a round still takes part in the sum of gradients.
    """
    config, train, ranks = learner.config, learner.config.train, learner.ranks
    learner.begin(step, batch)
    watch.begin(batch)
    for epoch in range(train.epochs):
        minibatches = batch.minibatches(config.minibatch_size, train.seed, step, epoch)
        if epoch == 0:
            for version, later in batch.in_advance(minibatches):
                for round_ in learner.rounds(later):
                    if round_.part is not None:
                        with torch.no_grad():
                            learner.logprobs(round_.part, version=version)
                    watch.progress(round_.responses)
                # Before the next version: another rank may fill other tokens of the same responses.
                batch.share_old(ranks)
            learner.policy.kept.release()
        for minibatch in minibatches:
            watch.minibatch(minibatch)
            plan = learner.plan(minibatch, watch)
            for round_ in plan.rounds:
                loss: Tensor | None = None
                if (part := round_.part) is not None:
                    with torch.set_grad_enabled(round_.gradient):
                        logps = learner.token_logprobs(part, plan)
                        watch.forward(part, logps)
                        loss, stats = learner.objective(
                            logps, part.advantages, part.segments, plan.totals, plan.constants
                        )
                if round_.gradient:
                    learner.backward(loss)
                if loss is not None:
                    learner.totals.add_loss(loss, stats)
                watch.progress(round_.responses)
            learner.end_minibatch()
            if plan.updates:
                watch.update(learner.update())
        batch.share(ranks)
    learner.totals.add_up(ranks)
