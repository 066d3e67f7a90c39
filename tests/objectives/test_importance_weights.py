import math

import pytest
import torch
from ragged import nothing_pruned

from qarl.config import CorrectionConfig
from qarl.objectives.common import TokenLogProbs
from qarl.objectives.correction import importance_weights
from qarl.objectives.segments import Segments


def run(
    old: torch.Tensor, sampler: torch.Tensor, lengths: list[int], level="token", mode="truncate", lower=None, upper=2.0
):
    """(weights, ratio, clamped)"""
    config = CorrectionConfig(level=level, mode=mode, lower=lower, upper=upper)
    segments = Segments.from_lengths(lengths)
    return importance_weights(config, TokenLogProbs(old, old, sampler), segments, nothing_pruned(segments))


def weights_of(ratios: list[float], **options) -> list[float]:
    old = torch.tensor(ratios, dtype=torch.float64).log()
    return run(old, torch.zeros_like(old), [1] * len(ratios), **options)[0].tolist()


def test_a_mask_keeps_a_ratio_on_its_bound():
    ratio = torch.tensor(2.0, dtype=torch.float64).log().exp().item()
    assert weights_of([2.0], level="token", mode="mask", lower=ratio, upper=3.0) == [ratio]
    assert weights_of([2.0], level="token", mode="mask", upper=ratio) == [ratio]


@pytest.mark.parametrize(
    ("level", "rejected"),
    [("token", [False, True, True, True]), ("sequence", [False, True, True]), ("geometric", [False, True, False])],
)
def test_a_mask_zeroes_units_of_the_level(level, rejected):
    old = torch.tensor([0.0, 2.0, -0.6, 0.8])  # responses: (), (0, 2) and (-0.6, 0.8)
    weights, _, _ = run(old, torch.zeros(4), [0, 2, 2], level, "mask", 0.6, 1.2)
    assert (weights == 0).tolist() == rejected


def test_truncation_rejects_nothing_and_tells_the_ratio_before_it():
    old = torch.tensor([5.0, -5.0])
    weights, ratio, _ = run(old, torch.zeros(2), [1, 1], lower=0.5)
    assert weights.all()
    assert ratio.tolist() == pytest.approx([math.exp(5.0), math.exp(-5.0)])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("old", "sampler"), [(-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf)])
def test_infinite_log_probs_give_finite_weights_and_are_marked(level, old, sampler):
    weights, _, clamped = run(torch.tensor([old]), torch.tensor([sampler]), [1], level)
    assert weights.isfinite().all()
    assert clamped.item() is (old != sampler)


def test_nan_is_not_masked_away():
    weights, _, _ = run(torch.tensor([math.nan]), torch.zeros(1), [1], "token", "mask", 0.5)
    assert weights.isnan().all()
