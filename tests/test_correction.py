import math

import pytest
import torch

from qarl.config import CorrectionConfig
from qarl.correction import importance_weights
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import finish_stats

LENGTHS = [3, 1, 0, 5]


def random_logps() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sampler = -torch.rand(9, generator=generator, dtype=torch.float64) * 3
    return sampler + 0.5 * torch.randn(9, generator=generator, dtype=torch.float64), sampler


def transcription(old: torch.Tensor, sampler: torch.Tensor, level: str, mode: str, lower: float | None, upper: float):
    out = []
    for o, b in zip(old.split(LENGTHS), sampler.split(LENGTHS), strict=True):
        deltas = [x - y for x, y in zip(o.tolist(), b.tolist(), strict=True)]
        for delta in deltas:
            exponent = {
                "token": delta, "sequence": math.fsum(deltas), "geometric": math.fsum(deltas) / len(deltas)
            }[level]  # fmt: skip
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
    options = CorrectionConfig(level=level, mode=mode, lower=lower, upper=upper)
    got = importance_weights(old, sampler, Segments.from_lengths(LENGTHS), options).weights
    torch.testing.assert_close(got, transcription(old, sampler, level, mode, lower, upper), rtol=1e-14, atol=0)


def weights_of(ratios: list[float], **options) -> list[float]:
    old = torch.tensor(ratios, dtype=torch.float64).log()
    segments = Segments.from_lengths([1] * len(ratios))
    return importance_weights(old, torch.zeros_like(old), segments, CorrectionConfig(**options)).weights.tolist()


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
    weights = importance_weights(
        old, torch.ones(2), Segments.from_lengths([2]), CorrectionConfig(level="geometric")
    ).weights
    assert not weights.requires_grad


@pytest.mark.parametrize(("level", "rejected"), [("token", 3 / 4), ("sequence", 1.0), ("geometric", 1 / 2)])
def test_rejections_are_counted_per_unit_of_the_level_and_empty_responses_are_not(level, rejected):
    old = torch.tensor([0.0, 2.0, -0.6, 0.8])  # responses: (), (0, 2) and (-0.6, 0.8)
    correction = importance_weights(
        old, torch.zeros(4), Segments.from_lengths([0, 2, 2]),
        CorrectionConfig(level=level, mode="mask", lower=0.6, upper=1.2),
    )  # fmt: skip
    metrics = finish_stats(correction.stats)
    assert metrics["correction/rejected_frac"] == rejected


def test_truncation_rejects_nothing():
    old = torch.tensor([5.0, -5.0])
    correction = importance_weights(
        old, torch.zeros(2), Segments.from_lengths([1, 1]), CorrectionConfig(level="token", lower=0.5, upper=2.0)
    )
    assert finish_stats(correction.stats)["correction/rejected_frac"] == 0.0


def test_metrics_are_of_the_bounded_weights():
    old = torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64).log()
    correction = importance_weights(
        old, torch.zeros_like(old), Segments.from_lengths([1, 2]), CorrectionConfig(level="token", lower=0.5, upper=2.0)
    )
    metrics = finish_stats(correction.stats)
    assert metrics["correction/weight_mean"] == pytest.approx(3.5 / 3)
    assert metrics["correction/ess"] == pytest.approx(3.5**2 / (3 * 5.25))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("old", "sampler"), [(-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf)])
def test_infinite_log_probs_give_finite_weights_and_are_counted(level, old, sampler):
    correction = importance_weights(
        torch.tensor([old]), torch.tensor([sampler]), Segments.from_lengths([1]), CorrectionConfig(level=level)
    )
    assert correction.weights.isfinite().all()
    assert finish_stats(correction.stats)["correction/clamped_frac"] == float(old != sampler)


def test_nan_is_not_masked_away():
    correction = importance_weights(
        torch.tensor([math.nan]), torch.zeros(1), Segments.from_lengths([1]),
        CorrectionConfig(level="token", mode="mask", lower=0.5),
    )  # fmt: skip
    assert correction.weights.isnan().all()
