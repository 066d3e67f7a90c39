import math

import pytest
import torch
from ragged import nothing_pruned

from qarl.config import CorrectionConfig
from qarl.objectives.common import TokenLogProbs
from qarl.objectives.correction import importance_weights
from qarl.objectives.segments import Segments

LENGTHS = [3, 1, 0, 5]


def run(
    old: torch.Tensor, sampler: torch.Tensor, lengths: list[int], level="token", mode="truncate", lower=None, upper=2.0
):
    """(weights, ratio, clamped)"""
    config = CorrectionConfig(level=level, mode=mode, lower=lower, upper=upper)
    segments = Segments.from_lengths(lengths)
    return importance_weights(config, TokenLogProbs(old, old, sampler), segments, nothing_pruned(segments))


def per_token(weights: torch.Tensor, level: str, lengths: list[int]) -> torch.Tensor:
    return weights if level == "token" else Segments.from_lengths(lengths).expand(weights)


def random_logps() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sampler = -torch.rand(9, generator=generator, dtype=torch.float64) * 3
    return sampler + 0.5 * torch.randn(9, generator=generator, dtype=torch.float64), sampler


def transcription(old: torch.Tensor, sampler: torch.Tensor, level: str, mode: str, lower: float | None, upper: float):
    out = []
    for o, b in zip(old.split(LENGTHS), sampler.split(LENGTHS), strict=True):
        deltas = [x - y for x, y in zip(o.tolist(), b.tolist(), strict=True)]
        for delta in deltas:
            exponent = {"token": delta, "sequence": math.fsum(deltas), "geometric": math.fsum(deltas) / len(deltas)}[
                level
            ]
            ratio = math.exp(exponent)
            low = -math.inf if lower is None else lower
            if mode == "truncate":
                out.append(min(max(ratio, low), upper))
            else:
                out.append(ratio if low <= ratio <= upper else 0.0)
    return torch.tensor(out, dtype=torch.float64)


# Bounds that are not each other's reciprocals: an implementation on sampler over learner would fail.
@pytest.mark.parametrize(("lower", "upper"), [(None, 1.1), (0.8, 1.1), (0.4, 1.6)])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_matches_the_formula(level, mode, lower, upper):
    old, sampler = random_logps()
    got = per_token(run(old, sampler, LENGTHS, level, mode, lower, upper)[0], level, LENGTHS)
    torch.testing.assert_close(got, transcription(old, sampler, level, mode, lower, upper), rtol=1e-14, atol=0)


def weights_of(ratios: list[float], **options) -> list[float]:
    old = torch.tensor(ratios, dtype=torch.float64).log()
    return run(old, torch.zeros_like(old), [1] * len(ratios), **options)[0].tolist()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_bounds_are_on_learner_over_sampler(level):
    # inside [0.5, 5] but with an inverse outside of it, and the other way round
    assert weights_of([4.0, 0.25], level=level, mode="mask", lower=0.5, upper=5.0) == pytest.approx([4.0, 0.0])
    assert weights_of([4.0, 0.25], level=level, lower=0.5, upper=5.0) == pytest.approx([4.0, 0.5])


def test_a_mask_keeps_a_ratio_on_its_bound():
    ratio = torch.tensor(2.0, dtype=torch.float64).log().exp().item()
    assert weights_of([2.0], level="token", mode="mask", lower=ratio, upper=3.0) == [ratio]
    assert weights_of([2.0], level="token", mode="mask", upper=ratio) == [ratio]


def test_no_gradient_reaches_the_log_probs():
    old = torch.zeros(2, requires_grad=True)
    weights = run(old, torch.ones(2), [2], level="geometric")[0]
    assert not weights.requires_grad


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
