import math

import pytest
import torch
from ragged import random_batch

from qarl.config import CorrectionConfig, ObjectiveConfig
from qarl.objectives import Segments, Totals, add_stats, build_objective, finish_stats

LENGTHS = [4, 1, 0, 9, 3, 30, 2, 5]
ADVANTAGES = [1.2, -0.7, 0.5, -1.1, 0.0, 0.9, -0.4, 2.0]
TOTALS = Totals(total_responses=8, total_tokens=54, max_tokens=32)
CUTS = [(0, 3), (3, 4), (4, 8)]  # micro-batches, as responses

CASES = [
    pytest.param(ObjectiveConfig(name=name, aggregation=aggregation), correction, id=f"{name}-{aggregation}")
    for name, correction in [
        ("tbpo", CorrectionConfig()),
        ("grpo", CorrectionConfig(level="token", mode="mask", lower=0.8, upper=1.1)),
        ("gspo", CorrectionConfig(level="geometric", lower=0.9, upper=1.05)),
    ]
    for aggregation in ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
]


def whole_and_parts(objective, batch):
    """(loss, gradient, metrics) of the minibatch at once, and of its micro-batches added up."""

    def loss_of(first: int, last: int):
        start, stop = sum(LENGTHS[:first]), sum(LENGTHS[:last])
        return objective(
            batch.logp[start:stop], batch.logp_old[start:stop], batch.logp_sampler[start:stop],
            batch.advantages[first:last], Segments.from_lengths(LENGTHS[first:last]), TOTALS,
        )  # fmt: skip

    results = []
    for cuts in [[(0, len(LENGTHS))], CUTS]:
        batch.logp.grad = None
        total, stats = 0.0, {}
        for first, last in cuts:
            loss, part = loss_of(first, last)
            loss.backward()
            total += loss.item()
            stats = add_stats(stats, part)
        results.append((total, batch.logp.grad, finish_stats(stats)))
    return results


@pytest.mark.parametrize(("objective_cfg", "correction_cfg"), CASES)
def test_micro_batches_give_the_bit_equal_gradient_of_the_minibatch_in_float32(objective_cfg, correction_cfg):
    batch = random_batch(LENGTHS, ADVANTAGES, 1e-3, dtype=torch.float32)
    (_, whole, _), (_, parts, _) = whole_and_parts(build_objective(objective_cfg, correction_cfg), batch)
    assert torch.equal(whole, parts)
    assert whole.any()


@pytest.mark.parametrize(("objective_cfg", "correction_cfg"), CASES)
def test_micro_batch_losses_and_metrics_add_up_to_the_minibatch(objective_cfg, correction_cfg):
    batch = random_batch(LENGTHS, ADVANTAGES, 0.05)
    (loss, _, metrics), (loss_parts, _, metrics_parts) = whole_and_parts(
        build_objective(objective_cfg, correction_cfg), batch
    )
    assert loss_parts == pytest.approx(loss, rel=1e-13)  # float64, another order of at most 54 additions
    assert metrics_parts == pytest.approx(metrics, rel=1e-13)


@pytest.mark.parametrize(("objective_cfg", "correction_cfg"), CASES)
def test_a_micro_batch_of_empty_responses_has_zero_loss_and_zero_metrics(objective_cfg, correction_cfg):
    empty = torch.zeros(0)
    loss, stats = build_objective(objective_cfg, correction_cfg)(
        empty.requires_grad_(), torch.zeros(0), torch.zeros(0), torch.ones(2), Segments.from_lengths([0, 0]), TOTALS
    )
    loss.backward()
    assert loss.item() == 0.0
    assert set(finish_stats(stats).values()) == {0.0}


def test_the_correction_multiplies_the_surrogate():
    objective = build_objective(
        ObjectiveConfig(name="grpo", aggregation="token-mean"), CorrectionConfig(level="token", lower=0.5, upper=3.0)
    )
    logp = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([-1.0 - math.log(2.0), -1.0 + math.log(4.0), -1.0 - math.log(8.0)], dtype=torch.float64)
    loss, _ = objective(
        logp, logp.detach(), sampler, torch.tensor([1.0]).double(), Segments.from_lengths([3]), Totals(1, 3, 3)
    )
    loss.backward()
    assert (-3 * logp.grad).tolist() == pytest.approx([2.0, 0.5, 3.0])


def test_the_loss_falls_when_a_rewarded_token_becomes_likelier():
    objective = build_objective(ObjectiveConfig(), CorrectionConfig())
    logp = torch.tensor([-1.0], requires_grad=True)
    objective(
        logp,
        torch.tensor([-1.0]),
        torch.tensor([-1.0]),
        torch.tensor([1.0]),
        Segments.from_lengths([1]),
        Totals(1, 1, 1),
    )[0].backward()
    assert logp.grad.item() == -1.0
