import math

import pytest
import torch
from objective_sections import objective_config
from ragged import Batch

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
    ratio = one_response(s, advantage).logp.detach().exp().item()
    edge = abs(ratio - 1.0)  # exact in binary for 0.5 <= ratio <= 2, so 1 +- edge is the ratio again
    for size, left in ((edge, False), (edge - 2.0**-52, True)):
        batch, options = one_response(s, advantage), wide(**{bound: size})
        assert gradient(batch, options) == (0.0 if left else pytest.approx(advantage * ratio, rel=1e-15))
        outside = options.band.outside(batch.logp.detach(), batch.advantages, batch.segments)
        assert outside.tolist() == [left]


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
