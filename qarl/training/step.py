"""The RL step, in the order of the method: sample, score, advantages, log-probs, loss, backward, update, publish.

What only watches (display, clock, signals, diagnostics, records) stands beside it, behind `qarl.training.observer`.

On several ranks each samples and scores its share of the prompts; then all of them have the whole batch, cut it in the
same way, and run their share of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from qarl.config import Config
from qarl.distributed.ranks import Ranks
from qarl.distributed.together import together
from qarl.objectives import Stats
from qarl.rewards import RewardResult
from qarl.rewards.shared import gather_results, score_share
from qarl.rollout.engine import RolloutEngine, SamplingParams
from qarl.rollout.shared import gather_rollouts, generate_share, publish_together, sleep_together
from qarl.training.batch import Batch, Part, build_batch, rounds
from qarl.training.decisions import minibatch_totals
from qarl.training.kept import KeptColumn
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
    ranks, samplers = learner.ranks, config.rollout.samplers(learner.ranks.count)

    prompts = run.stream.next(config.train.prompts_per_step)

    def own() -> tuple[list[Rollout], RewardResult]:
        with watch.phase("rollout", len(ranks.share(len(prompts), samplers)) * run.sampling.n):
            record = config.records_routing_at(step + 1)
            sampling = replace(run.sampling, seed=run.sampling.seed + step, record_routing=record)
            drawn = sample(engine, prompts, sampling, policy.version, watch, ranks, samplers)
        with watch.phase("reward"):
            return drawn, score_share(run.rewards, prompts, drawn, ranks, samplers)

    rollouts, scores = gather(
        *together(ranks, own, config.rollout.restarts_s), config.reward.max_failed_frac, watch, ranks
    )
    watch.scored(prompts, rollouts, scores)

    advantage = config.objective.advantage
    assert advantage is not None, "a checked configuration says its advantage"
    replays = config.model.routing == "replay"
    batch = build_batch(prompts, rollouts, scores.total, advantage, policy.version, policy.device, replays)

    with watch.phase("learner", learner.forwards(len(batch))):
        sleep_together(engine, ranks, config.rollout)
        # "deployed" has a forward after the last update, whose memory is nobody else's.
        early = learner.updates.begun > 0 and "deployed" not in config.diagnostics.due(step + 1)
        learn(learner, batch, step, watch, engine.wake if early else None)
        watch.learned(batch, learner.metrics(batch))
        engine.wake()

    with watch.phase("publish"):
        publish_together(engine, policy.current, ranks, config.rollout)


def sample(
    engine: RolloutEngine,
    prompts: list[Prompt],
    sampling: SamplingParams,
    version: int,
    watch: Observer,
    ranks: Ranks,
    samplers: range | None = None,
) -> list[Rollout]:
    """sampling.n responses to each of this rank's prompts, in order, from policy `version`.

    prompts: of all ranks. samplers: see `generate_share`.
    """
    before = 0

    def progress(finished: int, tokens: int) -> None:
        nonlocal before
        watch.progress(finished - before)
        before = finished

    return generate_share(engine, prompts, sampling, version, progress, ranks, samplers)


def gather(
    rollouts: list[Rollout], scores: RewardResult, max_failed_frac: float, watch: Observer, ranks: Ranks
) -> tuple[list[Rollout], RewardResult]:
    """What all ranks drew, and its rewards, in the order of the prompts."""
    if ranks.count == 1:
        return rollouts, scores
    with watch.phase("gather", None):
        return gather_rollouts(rollouts, ranks), gather_results(scores, ranks, max_failed_frac)


def learn(
    learner: Learner, batch: Batch, step: int, watch: Observer, before_last: Callable[[], None] | None = None
) -> None:
    """All optimizer steps on one batch; fills its log-probs.

    before_last: is called before the last of them, when the forwards and backwards are done.

    `logp_old` is the learner at the rollout's snapshot. Before the first update the current parameters *are* that
    snapshot, so the first minibatch takes it from its own forward; the rest is computed beforehand. A minibatch whose
    advantages are all 0 makes no update where that gives exactly no gradient.
    Ranks take micro-batches in rounds; one that has none in a round still enters the sum of gradients.
    """
    config, train, ranks = learner.config, learner.config.train, learner.ranks
    learner.begin(step)
    if config.objective.truncation_set == "replay":
        batch.kept = KeptColumn(len(batch))
    watch.begin(batch)
    for epoch in range(train.epochs):
        minibatches = batch.minibatches(config.minibatch_size, train.seed, step, epoch)
        last = minibatches[-1] if epoch == train.epochs - 1 else None
        if epoch == 0:
            later = batch.part([i for minibatch in minibatches[1:] for i in minibatch.indices])
            for round_ in rounds(learner.cut(later), ranks.count):
                if (part := round_[ranks.rank]) is not None:
                    with torch.no_grad():
                        learner.logprobs(part)
                watch.progress(responses(round_))
            batch.share_old(ranks)
        for minibatch in minibatches:
            watch.minibatch(minibatch)
            totals = minibatch_totals(minibatch, config.rollout.max_response_length)
            constants, slots = learner.of_all(minibatch, watch)
            idle, live = learner.micro_batches(minibatch)
            rows = sum(part.counted_rows for part in live)
            dealt = [(round_, False) for round_ in rounds(idle, ranks.count)]
            dealt += [(round_, True) for round_ in rounds(live, ranks.count)]
            for round_, gradient in dealt:
                found: tuple[Tensor, Stats] | None = None
                if (part := round_[ranks.rank]) is not None:
                    with torch.set_grad_enabled(gradient):
                        logps = learner.token_logprobs(part, rows, slots)
                        watch.forward(part, logps)
                        found = learner.objective(logps, part.advantages, part.segments, totals, constants)
                if gradient:
                    learner.backward(None if found is None else found[0])
                if found is not None:
                    learner.totals.add_loss(*found)
                watch.progress(responses(round_))
            if minibatch is last and before_last is not None:
                before_last()
            learner.totals.end_minibatch()
            if live:
                watch.update(learner.update())
        batch.share(ranks)
    learner.totals.add_up(ranks)


def responses(round_: list[Part | None]) -> int:
    """Of all ranks in a round."""
    return sum(len(part) for part in round_ if part is not None)
