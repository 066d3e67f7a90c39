import math

import pytest
import torch
from objective_sections import objective_config
from ragged import Batch, random_batch

from qarl.config import CorrectionConfig, ObjectiveConfig
from qarl.objectives.common import finish_stats
from qarl.objectives.objective import build_objective
from qarl.objectives.segments import Segments, Totals

PAPER = objective_config(name="tbpo", aggregation="seq-mean-token-sum")
LENGTHS = [4, 1, 0, 9, 3, 30, 2, 5, 12, 7]
ADVANTAGES = [1.2, -0.7, 0.5, -1.1, 0.0, 0.9, -0.4, 2.0, -1.5, 0.3]


def wide(**changes: float) -> ObjectiveConfig:
    """Bands that random ratios fall on both sides of."""
    bands = {"seq_clip_ratio_high": 0.04, "neg_seq_clip_ratio_high": 0.07, "neg_seq_clip_ratio_low": 0.03}
    return objective_config(name="tbpo", aggregation="seq-mean-token-sum", **{**bands, **changes})


def run(batch: Batch, options: ObjectiveConfig):
    """(the sum of w' times the surrogate over all tokens, stats)."""
    loss, stats = build_objective(options, CorrectionConfig())(
        batch.logps, batch.advantages, batch.segments, Totals(1, 1, 1)
    )
    return -loss, stats


def test_float32_inputs_give_float32_values_near_float64():
    single = random_batch(LENGTHS, ADVANTAGES, 0.02, dtype=torch.float32)
    double = Batch(
        *(x.detach().double() for x in (single.logp, single.logp_old, single.logp_sampler)),
        single.advantages.double(),
        single.segments,
    )
    value = run(single, wide())[0]
    assert value.dtype == torch.float32
    # log-probs of order 4 carry 2^-22 of absolute rounding into the exponent of each of 73 values of order 1
    torch.testing.assert_close(value.double(), run(double, wide())[0], rtol=0, atol=73 * 2**-21)


def one_response(s: float, advantage: float) -> Batch:
    """One token whose float64 ratio exp(l - o) is exp(log(s)); the ratio as computed is read back by `ratio_of`."""
    return Batch(
        torch.tensor([math.log(s)], dtype=torch.float64, requires_grad=True),
        torch.zeros(1, dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        Segments.from_lengths([1]),
    )


def gradient(batch: Batch, options: ObjectiveConfig) -> float:
    run(batch, options)[0].backward()
    return batch.logp.grad.item()


@pytest.mark.parametrize(
    ("s", "advantage", "bound"),
    [
        (1.25, 1.0, "seq_clip_ratio_high"),
        (1.25, -1.0, "neg_seq_clip_ratio_high"),
        (0.75, -1.0, "neg_seq_clip_ratio_low"),
    ],
)
def test_a_ratio_exactly_on_its_edge_keeps_its_gradient_and_one_ulp_beyond_loses_it(s, advantage, bound):
    batch = one_response(s, advantage)
    ratio = batch.logp.detach().exp().item()
    edge = abs(ratio - 1.0)  # exact in binary for 0.5 <= ratio <= 2, so 1 +- edge is the ratio again
    assert gradient(batch, wide(**{bound: edge})) == pytest.approx(advantage * ratio, rel=1e-15)
    narrower = edge - 2.0**-52
    assert gradient(one_response(s, advantage), wide(**{bound: narrower})) == 0.0


def test_drops_are_counted_on_each_of_the_three_sides():
    ratios = [1.2, 1.0, 0.5, 0.8, 1.2, 1.3, 1.0, 1.2]
    advantages = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 0.0]
    batch = Batch(
        torch.tensor(ratios, dtype=torch.float64).log(),
        torch.zeros(8, dtype=torch.float64),
        torch.zeros(8, dtype=torch.float64),
        torch.tensor([*advantages, 1.0], dtype=torch.float64),
        Segments.from_lengths([1] * 8 + [0]),  # the last response is empty and is not counted
    )
    metrics = finish_stats(run(batch, PAPER)[1])
    assert metrics["policy/tbpo_clipped_high_frac"] == 1 / 8
    assert metrics["policy/tbpo_dropped_neg_low_frac"] == 1 / 8
    assert metrics["policy/tbpo_dropped_neg_high_frac"] == 2 / 8
    assert metrics["policy/clip_frac"] == 4 / 8
    assert metrics["policy/ratio_mean"] == pytest.approx(sum(ratios) / 8)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("column", ["logp", "logp_old", "logp_sampler"])
def test_an_infinite_log_prob_gives_finite_values_and_gradients_and_is_counted(column, advantage):
    batch = random_batch([3, 2], [advantage, advantage], 0.01)
    x = getattr(batch, column).detach().clone()
    x[1] = -math.inf
    setattr(batch, column, x)
    batch.logp.requires_grad_()
    value, stats = run(batch, PAPER)
    value.backward()
    assert value.isfinite()
    assert batch.logp.grad.isfinite().all()
    metrics = finish_stats(stats)
    # A token outside the learner's set makes the response's ratio exactly 0, which is no exponent that was clamped.
    assert metrics["policy/ratio_clamped_frac"] == 0.0
    assert metrics["correction/clamped_frac"] == (0.5 if column == "logp_sampler" else 0.0)
    assert metrics["policy/outside_frac"] == (0.0 if column == "logp_sampler" else 1 / 5)
    assert metrics["policy/outside_responses_frac"] == (0.0 if column == "logp_sampler" else 0.5)
    if column != "logp_sampler":
        assert not batch.logp.grad[:3].any()
