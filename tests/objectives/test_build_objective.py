"""The built objective: independent of the cut into micro-batches, finite at every edge, clear about what it needs."""

import math

import pytest
import torch
from objective_sections import objective_config
from pairwise import pairwise
from ragged import Batch, random_batch

from qarl.config import CorrectionConfig
from qarl.objectives.common import Needs, add_stats, finish_stats
from qarl.objectives.correction_config import RejectRule
from qarl.objectives.objective import build_objective
from qarl.objectives.segments import Totals

LENGTHS = [4, 1, 0, 9, 3, 30, 2, 5]
ADVANTAGES = [1.2, -0.7, 0.5, -1.1, 0.0, 0.9, -0.4, 2.0]
TOTALS = Totals(total_responses=8, total_tokens=54, max_tokens=32)
CUTS = [(0, 3), (3, 4), (4, 8)]  # micro-batches, as responses
AGGREGATIONS = ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
NONE = CorrectionConfig()
RULES = [
    RejectRule(estimator="k3", aggregate="sum", upper=0.05, signal="rollout"),
    RejectRule(estimator="ratio", aggregate="mean", lower=0.98, upper=1.03),
]
TOKEN = CorrectionConfig(level="token", mode="mask", lower=0.8, upper=1.1, normalize=True, reject=RULES, veto=0.5)
GEOMETRIC = CorrectionConfig(level="geometric", lower=0.9, upper=1.05, normalize=True)
RULES_ONLY = CorrectionConfig(reject=RULES, veto=0.5)
PENALTIES = {"kl_coef": 0.1, "entropy_coef": 0.05}

SETUPS = [
    ({"name": "tbpo"}, RULES_ONLY),
    ({"name": "grpo"}, TOKEN),
    ({"name": "gspo"}, GEOMETRIC),
    ({"name": "grpo", "loss": "detach_center", **PENALTIES}, TOKEN),
    ({"name": "dapo", "loss": "detach", "ratio": "shadow"}, RULES_ONLY),
    ({"name": "dual_clip_grpo", "ratio": "rollout"}, NONE),
    ({"name": "mis_gspo"}, NONE),
    ({"name": "sapo", **PENALTIES}, TOKEN),
    ({"name": "positive_only", "loss": "detach_center"}, NONE),
    ({"name": "on_policy"}, GEOMETRIC),
    ({"name": "reinforce"}, NONE),
    ({"name": "rloo", **PENALTIES}, TOKEN),
    ({"name": "m2po"}, NONE),
]
OBJECTIVES = {
    f"{options['name']}{i}": build_objective(objective_config(**options), correction)
    for i, (options, correction) in enumerate(SETUPS)
}
CASES = [pytest.param(objective, id=name) for name, objective in OBJECTIVES.items()]
COLUMNS = ["logp", "logp_old", "logp_sampler", "logp_shadow", "logp_ref", "logp logp_old"]


def built(aggregation: str, options: dict, correction: CorrectionConfig):
    return build_objective(objective_config(**options, aggregation=aggregation), correction)


CUT_CASES = [
    pytest.param(built(aggregation, *setup), id=f"{setup[0]['name']}{i}-{aggregation}")
    for i, setup in enumerate(SETUPS)
    for aggregation in (AGGREGATIONS if i < 3 else AGGREGATIONS[:1])
]


def whole_and_parts(objective, batch: Batch):
    """(loss, gradient, metrics) of the minibatch at once, and of its micro-batches added up."""
    constants = objective.constants(batch.logps, batch.advantages, batch.segments)
    results = []
    for cuts in [[(0, len(LENGTHS))], CUTS]:
        batch.logp.grad = None
        total, stats = 0.0, {}
        for first, last in cuts:
            part = batch.part(first, last)
            loss, added = objective(part.logps, part.advantages, part.segments, TOTALS, constants)
            loss.backward()
            total += loss.item()
            stats = add_stats(stats, added)
        results.append((total, batch.logp.grad, finish_stats(stats)))
    return results


@pytest.mark.parametrize("objective", CUT_CASES)
def test_micro_batches_add_up_to_the_minibatch_with_the_bits_of_its_gradient(objective):
    batch = random_batch(LENGTHS, ADVANTAGES, 1e-3, dtype=torch.float32)
    (_, whole, _), (_, parts, _) = whole_and_parts(objective, batch)
    assert torch.equal(whole, parts)
    assert whole.any()
    (loss, _, metrics), (loss_parts, _, metrics_parts) = whole_and_parts(
        objective, random_batch(LENGTHS, ADVANTAGES, 0.05)
    )
    assert loss_parts == pytest.approx(loss, rel=1e-12)  # float64, another order of at most 54 additions
    assert metrics_parts == pytest.approx(metrics, rel=1e-12)


def evaluate(objective, batch: Batch):
    """(loss, gradient, metrics) of a batch on its own."""
    lengths = batch.segments.lengths
    totals = Totals(len(lengths), max(int(lengths.sum()), 1), 32)
    constants = objective.constants(batch.logps, batch.advantages, batch.segments)
    loss, stats = objective(batch.logps, batch.advantages, batch.segments, totals, constants)
    loss.backward()
    return loss.item(), batch.logp.grad, finish_stats(stats)


@pytest.mark.parametrize("objective", CASES)
def test_empty_responses_alone_have_zero_loss_and_zero_metrics(objective):
    loss, gradient, metrics = evaluate(objective, random_batch([0, 0], [1.0, -1.0], 0.1))
    assert loss == 0.0 and gradient.shape == (0,)
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize(("name", "column", "value"), pairwise(OBJECTIVES, COLUMNS, [-math.inf, math.inf]))
def test_infinite_log_probs_are_finite_in_loss_gradient_and_metrics(name, column, value):
    objective = OBJECTIVES[name]
    batch = random_batch([3, 2, 1], [0.7, -0.9, 0.2], 0.01)
    for attribute in column.split():
        x = getattr(batch, attribute).detach().clone()
        x[1] = x[4] = value
        setattr(batch, attribute, x)
    batch.logp.requires_grad_()
    loss, gradient, metrics = evaluate(objective, batch)
    assert math.isfinite(loss)
    assert gradient.isfinite().all()
    assert all(math.isfinite(x) for x in metrics.values())
    if "logp" in column.split():
        assert gradient[[1, 4]].tolist() == [0.0, 0.0]
    zero = ["logp", "logp_old", "logp logp_old", *(["logp_shadow"] if objective.ratio == "shadow" else [])]
    outside = value == -math.inf and column in zero
    assert metrics["policy/outside_frac"] == (pytest.approx(2 / 6) if outside else 0.0)


@pytest.mark.parametrize("objective", CASES)
def test_a_nan_reaches_the_loss(objective):
    batch = random_batch([3, 2, 1], [0.7, -0.9, 0.2], 0.001)
    x = batch.logp.detach().clone()
    x[1] = math.nan
    batch.logp = x.requires_grad_()
    assert math.isnan(evaluate(objective, batch)[0])


@pytest.mark.parametrize("objective", CASES)
def test_equal_rewards_give_no_gradient_exactly_where_the_objective_says_so(objective):
    batch = random_batch(LENGTHS, [0.0] * 8, 0.02)
    _, gradient, _ = evaluate(objective, batch)
    if objective.zero_advantage_is_idle:
        assert not gradient.any()
    elif objective.needs.reference:
        assert gradient.any()
    else:  # a centre is subtracted from the weights, also of a response of advantage 0 beside others
        assert evaluate(objective, random_batch([2, 2], [0.0, 1.0], 0.001))[1][:2].all()


REJECT_ALL = [
    CorrectionConfig(veto=0.999999, reject=[RejectRule(estimator="ratio", aggregate="mean", lower=1e6)]),
    CorrectionConfig(level="token", mode="mask", lower=1e6, upper=2e6, normalize=True),
    CorrectionConfig(level="sequence", mode="mask", lower=1e6, upper=2e6, normalize=True),
]


@pytest.mark.parametrize("correction", REJECT_ALL, ids=["rules", "token mask", "sequence mask"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "on_policy", "rloo"])
def test_with_every_token_rejected_the_loss_and_gradient_are_zero_and_counted(name, correction):
    objective = build_objective(objective_config(name=name), correction)
    loss, gradient, metrics = evaluate(objective, random_batch(LENGTHS, ADVANTAGES, 0.1))
    assert loss == 0.0
    assert not gradient.any()
    assert metrics["correction/rejected_frac"] == 1.0
    assert metrics["correction/weight_mean"] == metrics["correction/ess"] == 0.0


@pytest.mark.parametrize(
    ("options", "correction", "needs"),
    [
        ({}, NONE, Needs()),
        ({"name": "grpo", "ratio": "shadow"}, NONE, Needs(shadow=True)),
        ({"kl_coef": 0.1}, NONE, Needs(reference=True)),
        ({"entropy_coef": 0.1}, NONE, Needs(entropy=True)),
        ({"name": "grpo", "loss": "detach_center"}, NONE, Needs(minibatch=True)),
        ({"name": "grpo"}, GEOMETRIC, Needs(minibatch=True)),
        ({"name": "grpo", "loss": "detach"}, RULES_ONLY, Needs()),
    ],
)
def test_needs_are_what_the_options_ask_for_and_no_more(options, correction, needs):
    assert build_objective(objective_config(**options), correction).needs == needs


BOUNDS = {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}


@pytest.mark.parametrize(
    ("options", "spread"),
    [
        ({"name": "tbpo"}, 0.002),
        ({"name": "gspo", **BOUNDS}, 0.15),
        ({"name": "grpo", **BOUNDS}, 0.05),
        ({"name": "dapo", **BOUNDS, "ratio": "rollout"}, 0.05),
        ({"name": "dual_clip_grpo", **BOUNDS, "clip_ratio_c": 1.05}, 0.1),
        ({"name": "positive_only", **BOUNDS}, 0.05),
        ({"name": "grpo", "loss": "no_clip"}, 3.0),
        ({"name": "grpo", **BOUNDS, "loss": "detach"}, 0.05),
        ({"name": "sapo"}, 0.05),
        ({"name": "rloo"}, 0.05),
    ],
    ids=lambda x: x["name"] if isinstance(x, dict) else "",
)
def test_a_token_is_outside_the_band_exactly_if_it_has_no_gradient(options, spread):
    objective = build_objective(objective_config(**options), NONE)
    batch = random_batch(LENGTHS, ADVANTAGES, spread)
    _, gradient, _ = evaluate(objective, batch)
    advantage = batch.segments.expand(batch.advantages)
    worth = advantage > 0 if options["name"] == "positive_only" else advantage != 0
    if objective.band is None:
        assert gradient[worth].all()
        return
    outside = objective.band.outside(objective.log_ratio(batch.logps, batch.segments), batch.advantages, batch.segments)
    assert torch.equal(gradient == 0, outside | ~worth)
    assert 0 < int(outside.sum()) < int(worth.sum())


def test_contributions_are_means_by_the_sign_of_the_advantage():
    batch = random_batch(LENGTHS, ADVANTAGES, 0.1)
    _, _, metrics = evaluate(build_objective(objective_config(name="grpo"), NONE), batch)
    sums = {}
    for l, o, b, a in batch.responses():  # noqa: E741
        for x, y, z in zip(l, o, b, strict=True):
            sign = "pos" if a > 0 else "neg" if a < 0 else "zero"
            sums.setdefault(f"train_{sign}", []).append(-(math.exp(x - y) - 1) * a)
            sums.setdefault(f"rollout_{sign}", []).append(-(math.exp(x - z) - 1) * a)
    for name in ("train_pos", "train_neg", "rollout_pos", "rollout_neg"):
        assert metrics[f"policy/contribution_{name}"] == pytest.approx(sum(sums[name]) / len(sums[name]), rel=1e-11)


def test_kl_estimates_are_of_both_ratios_whichever_the_objective_clips():
    batch = random_batch(LENGTHS, ADVANTAGES, 0.2)
    rows = [row for l, o, b, _ in batch.responses() for row in zip(l, o, b, strict=True)]  # noqa: E741
    moved, apart = [u - v for u, v, _ in rows], [u - w for u, _, w in rows]
    for options in ({"name": "grpo", "ratio": "rollout"}, {"name": "gspo"}):
        _, _, metrics = evaluate(build_objective(objective_config(**options), NONE), batch)
        for name, x in (("kl", moved), ("rollout", apart)):
            assert metrics[f"policy/{name}_k1"] == pytest.approx(-sum(x) / len(x), rel=1e-12)
            k3 = sum(math.exp(d) - 1 - d for d in x) / len(x)
            assert metrics[f"policy/{name}_k3"] == pytest.approx(k3, rel=1e-12)


def test_the_balance_of_w_is_that_of_the_clipped_surrogate():
    batch = random_batch(LENGTHS, ADVANTAGES, 0.3)
    _, _, metrics = evaluate(build_objective(objective_config(name="grpo"), NONE), batch)
    weights = []
    for (logp, old, _, _), advantage in zip(batch.responses(), batch.advantages.tolist(), strict=True):
        for x, y in zip(logp, old, strict=True):
            ratio = math.exp(x - y)
            weights.append(min(ratio * advantage, max(0.8, min(1.2, ratio)) * advantage))
    positive, negative = sum(w for w in weights if w > 0), -sum(w for w in weights if w < 0)
    assert metrics["policy/mu_w"] == pytest.approx(sum(weights) / len(weights), rel=1e-11)
    assert metrics["policy/w_negative_frac"] == pytest.approx(sum(w < 0 for w in weights) / len(weights))
    assert metrics["policy/w_imbalance"] == pytest.approx(positive / negative, rel=1e-11)
