"""Tokens that leave the learner's truncated distribution after an update: what a minibatch loses, and warnings."""

import random
from types import SimpleNamespace

import pytest
import torch
from thread_ranks import as_threads
from tiny_runs import parts

from qarl.batch.observer import Observer
from qarl.objectives.objective import OUTSIDE, OUTSIDE_RESPONSES, ZERO_WEIGHT_RESPONSES
from qarl.rewards import RewardResult
from qarl.training.alarms import Alarms
from qarl.training.metrics import truncation_bias_bound
from qarl.training.totals import PER_MINIBATCH, LearnerTotals

pytestmark = pytest.mark.usefixtures("one_thread")


class Shares(Observer):
    """Counts per minibatch: tokens outside, all tokens, responses with such a token, with weight 0, all responses."""

    def __init__(self, run) -> None:
        self.objective, self.counts = run.learner.objective, []

    def minibatch(self, minibatch) -> None:
        self.counts.append([0, 0, 0, 0, 0])

    def forward(self, part, logps) -> None:
        outside = logps.logp.isneginf() | logps.logp_old.isneginf()
        gone = self.objective.pruned(logps, part.segments).tokens
        kept = part.segments.sum((~gone).long())
        hit = part.segments.sum(outside.long())
        found = [outside.sum(), outside.numel(), (hit > 0).sum(), (kept == 0).sum(), len(kept)]
        self.counts[-1] = [a + int(b) for a, b in zip(self.counts[-1], found, strict=True)]


@pytest.mark.parametrize(("name", "cut", "outside"), [("rloo", {"top_k": 20}, "response")])
def test_a_learner_that_moved_loses_tokens_and_no_response_and_says_which_minibatch(llama, name, cut, outside):
    draw = random.Random(0)
    run = parts(
        llama,
        objective={"name": name, "dvp_outside": outside},
        rollout={"n": 4, "max_response_length": 150, "max_num_seqs": 32, **cut},
        optim={"lr": 3e-4},
        train={"minibatch_size": 8},
    )
    watch, said = Shares(run), []
    metrics = run.learn(run.batch(lambda tokens: draw.random()), 0, watch)
    first, second = watch.counts
    assert first[0] == 0 and 0 < second[0] < 0.1 * second[1]  # the first minibatch is at the rollout's weights
    assert second[2] > 1
    assert second[3] == (second[2] if outside else 0)
    assert metrics[f"{OUTSIDE}_max"] == pytest.approx(second[0] / second[1])
    assert metrics[f"{OUTSIDE_RESPONSES}_max"] == second[2] / second[4]
    assert metrics[f"{ZERO_WEIGHT_RESPONSES}_max"] == second[3] / second[4]
    assert metrics[ZERO_WEIGHT_RESPONSES] == second[3] / (first[4] + second[4])
    Alarms(run.config, run.learner.objective, said.append).step(1, metrics)
    share, limit = (second[2] / second[4], 0.1) if outside else (second[0] / second[1], 0.01)
    assert len(said) == (share > limit)
    assert all(f"in one minibatch {share:.2%}" in line for line in said)


@pytest.mark.parametrize(("name", "cut", "learner"), [("tbpo", {"top_k": 20, "min_p": 0.001}, "aligned")])
def test_with_replayed_sets_no_token_falls_out_when_the_learner_moves(llama, name, cut, learner):
    def run(truncation_set: str, **more):
        made = parts(
            llama,
            objective={"name": name, "truncation_set": truncation_set, **more},
            quant={"learner": learner},
            rollout={"n": 4, "max_response_length": 60, "max_num_seqs": 32, **cut},
            optim={"lr": 1e-3},
            train={"minibatch_size": 8, "epochs": 2},
        )
        batch = made.batch(lambda tokens: random.Random(sum(tokens)).random())
        watch = Shares(made)
        metrics = made.learn(batch, 0, watch)
        old, now = batch.logp_old.read(batch.whole()), batch.logp.read(batch.whole())
        return metrics, watch.counts, old, now

    _, counts, old, now = run("own")
    assert sum(count[0] for count in counts[1:]) > 0 and not torch.equal(old.isinf(), now.isinf())
    metrics, counts, old, now = run("replay", kl_coef=0.01)
    assert torch.equal(old.isinf(), now.isinf())
    assert old.isfinite().all() or learner == "full_precision"  # which has another set than the sampler from the start
    assert metrics[f"{OUTSIDE}_max"] == max(count[0] / count[1] for count in counts)
    assert metrics["policy/kl_ref"] < 1.0 and metrics["policy/kl_ref_clamped_frac"] == 0.0


def test_the_share_of_a_minibatch_is_that_of_all_ranks():
    def pair(found: float, count: float) -> dict[str, torch.Tensor]:
        return dict.fromkeys(PER_MINIBATCH, torch.tensor([found, count], dtype=torch.float64))

    def work(ranks) -> LearnerTotals:
        totals = LearnerTotals(entropy_tokens=1)
        for share in ([(1, 10), (9, 10)], [(3, 10), None])[ranks.rank]:  # None: no response of the minibatch is here
            if share is not None:
                totals.add_loss(torch.zeros(()), pair(*share))
            totals.end_minibatch()
        totals.add_up(ranks)
        return totals

    for totals in as_threads(2, work):
        assert {totals.metrics(2)[f"{name}_max"] for name in PER_MINIBATCH} == {0.9}
        totals.minibatch_stats[0] = pair(19, 20)
        assert {totals.metrics(2)[f"{name}_max"] for name in PER_MINIBATCH} == {0.95}


def test_the_bias_of_truncation_is_bounded_by_rewards_length_and_lost_mass():
    rollouts = [SimpleNamespace(token_ids=[1] * n) for n in (3, 10)]
    scores = RewardResult([0.5, -2.0], {}, {}, [])
    assert truncation_bias_bound(rollouts, scores, 0.99) == pytest.approx(2 * 2.0 * 10 * 0.01)
