"""The RL step, in this order: sample, score, advantages, log-probs, loss, backward, update, publish.

Progress display, timing, signal handling, diagnostics and records are observers (`qarl.batch.observer`).

With several ranks, each rank samples and scores its share of the prompts. Then every rank gets the whole batch, splits
it in the same way, and runs its share of the micro-batches.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qarl.batch.batch import Batch, build_batch
from qarl.batch.observer import Observer, Observers
from qarl.config import Config
from qarl.distributed.together import together
from qarl.rewards import RewardResult
from qarl.rewards.shared import gather_results, score_share
from qarl.rollout.engine import round_seed
from qarl.rollout.shared import asleep, gather_rollouts, generate_share, publish_together
from qarl.training.dynamic_sampling import Sampled, sample_until_full
from qarl.training.learner import Learner
from qarl.training.setup import Run
from qarl.types import Rollout


def rl_step(config: Config, run: Run, step: int, watch: Observers) -> None:
    """Run one step.

    Before the first update, the position in the data is the only state that changes. From `Observer.learned` on the
    step counts as done, even if writing its records or publishing fails.

    Args:
        config: Configuration of the run.
        run: The run.
        step: Step number, counted from 0. With the seed it determines every sampled token and every shuffle.
        watch: Observers of the step.
    """
    policy, learner = run.policy, run.learner
    prompts, rollouts, scores = sample(config, run, step, watch)
    watch.scored(prompts, rollouts, scores)

    batch = build_batch(  # with advantages
        prompts,
        rollouts,
        scores.total,
        config.objective.advantage,
        policy.version,
        policy.device,
        replays=config.model.routing == "replay",
        mask_truncated=config.objective.mask_truncated,
        stale=config.learns_stale,
        given=config.given,
    )
    if (asynchronous := config.rollout.asynchronous) is not None:
        batch.trust_sampler(asynchronous.verify_frac, config.train.seed, step)

    with (
        watch.phase("learner", learner.forwards(batch, step)),
        asleep(run.engine, learner, learner.ranks, config.rollout),
    ):
        learn(learner, batch, step, watch)
        watch.learned(batch, learner.metrics(batch))

    with watch.phase("publish"):
        publish_together(run.engine, policy.current, learner.ranks, config.rollout)
        if run.source is not None:
            run.source.fill(step + 1)


def sample(config: Config, run: Run, step: int, watch: Observers) -> Sampled:
    """Sample and score the step's prompts: once, or in rounds of dynamic sampling until enough groups differ."""

    def sample_round(count: int, number: int = 0) -> Sampled:
        get = sample_and_score if run.source is None else take
        sampled = get(config, run, count, step, watch, number)
        run.stream.record_rewards(sampled.prompts, sampled.scores.total)
        return sampled

    dynamic, wanted = config.rollout.dynamic_sampling, config.train.prompts_per_step
    if dynamic is None:
        return sample_round(wanted)
    sampled, metrics = sample_until_full(dynamic, wanted, sample_round)
    watch.sampled(metrics)
    return sampled


def take(config: Config, run: Run, count: int, step: int, watch: Observers, number: int) -> Sampled:
    """Take the next `count` groups and their scores from `run.source`.

    Args:
        config: Configuration of the run.
        run: A run with a source.
        count: Number of groups, over all ranks.
        step: Step number, counted from 0.
        watch: Observers of the step.
        number: Round of dynamic sampling, counted from 0. In rounds after the first, the source starts only the missing
            groups. If it started a whole step's groups, the next step would get the rest, which may be too stale.

    Returns:
        Prompts, rollouts and scores of all ranks.
    """
    assert run.source is not None
    with watch.phase("rollout", count * config.rollout.n):
        if number == 0:
            run.source.fill(step)
        sampled = Sampled(*run.source.take(count, step, lambda: watch.progress(0)))
    with watch.phase("reward", None):  # scored by the source; an empty phase, so that `time/reward_s` exists
        return sampled


def sample_and_score(config: Config, run: Run, count: int, step: int, watch: Observers, number: int) -> Sampled:
    """Sample n responses to each of the next `count` prompts, and score them. Each rank does its share.

    Args:
        config: Configuration of the run.
        run: The run.
        count: Number of prompts, over all ranks.
        step: Step number, counted from 0.
        watch: Observers of the step.
        number: Round of dynamic sampling, counted from 0.

    Returns:
        Prompts, rollouts and scores of all ranks.
    """
    prompts = run.stream.next(count)
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
            rollouts = gather_rollouts(rollouts, ranks)
            scores = gather_results(scores, ranks, config.reward.max_failed_frac)
    return Sampled(prompts, rollouts, scores)


def learn(learner: Learner, batch: Batch, step: int, watch: Observer) -> None:
    """Run all optimizer steps on one batch, and fill its log-probs.

    `logp_old` holds the learner's log-probs at the rollout's weights. Before the first update these are the current
    weights, so the first minibatch gets `logp_old` from its training forward, and later minibatches from a separate
    forward before the first update. Responses of asynchronous rollouts with tokens of earlier versions also get
    separate forwards, one per version.

    A minibatch makes no update if all of its responses have advantage 0, and the objective gives them a gradient of
    exactly 0. With several ranks, micro-batches run in rounds. A rank without a micro-batch in a round still takes part
    in the sum of gradients.

    Args:
        learner: The learner.
        batch: Responses of the step.
        step: Step number, counted from 0.
        watch: Observer of the step.
    """
    ranks = learner.ranks
    learner.begin(step, batch)
    watch.begin(batch)
    for epoch in range(learner.config.train.epochs):
        minibatches = learner.minibatches(batch, step, epoch)
        if epoch == 0:
            for version, later in batch.in_advance(minibatches):
                for round_ in learner.rounds(later):
                    if round_.part is not None:
                        with torch.no_grad():
                            learner.logprobs(round_.part, version=version)
                    watch.progress(round_.responses)
                # Share before the next version runs, in which another rank may fill other tokens of the same responses.
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
                    learner.updates.backward(loss)
                if loss is not None:
                    learner.totals.add_loss(loss, stats)
                watch.progress(round_.responses)
            learner.end_minibatch()
            if plan.updates:
                watch.update(learner.update())
        batch.share(ranks)
    learner.totals.add_up(ranks)
