import math

import pytest
import torch

from qarl.objectives.correction.weights import Weighting, importance_weights
from qarl.objectives.ratios import log_ratio
from qarl.objectives.segments import Segments

LENGTHS = [3, 1, 0, 5]


def run(
    old: torch.Tensor, sampler: torch.Tensor, lengths: list[int], level="token", mode="truncate", lower=None, upper=2.0
):
    corr = log_ratio(old, sampler)
    return importance_weights(corr, Segments.from_lengths(lengths), Weighting(level, mode, lower, upper))


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
    got = per_token(run(old, sampler, LENGTHS, level, mode, lower, upper).weights, level, LENGTHS)
    torch.testing.assert_close(got, transcription(old, sampler, level, mode, lower, upper), rtol=1e-14, atol=0)


def weights_of(ratios: list[float], **options) -> list[float]:
    old = torch.tensor(ratios, dtype=torch.float64).log()
    return run(old, torch.zeros_like(old), [1] * len(ratios), **options).weights.tolist()


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
    weights = run(old, torch.ones(2), [2], level="geometric").weights
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("level", "rejected"),
    [("token", [False, True, True, True]), ("sequence", [False, True, True]), ("geometric", [False, True, False])],
)
def test_rejections_are_marked_per_unit_of_the_level(level, rejected):
    old = torch.tensor([0.0, 2.0, -0.6, 0.8])  # responses: (), (0, 2) and (-0.6, 0.8)
    got = run(old, torch.zeros(4), [0, 2, 2], level, "mask", 0.6, 1.2)
    assert got.rejected.tolist() == rejected
    assert torch.equal(got.weights == 0, got.rejected)


def test_truncation_rejects_nothing_and_tells_the_ratio_before_it():
    old = torch.tensor([5.0, -5.0])
    got = run(old, torch.zeros(2), [1, 1], lower=0.5)
    assert not got.rejected.any()
    assert got.ratio.tolist() == pytest.approx([math.exp(5.0), math.exp(-5.0)])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("old", "sampler"), [(-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf)])
def test_infinite_log_probs_give_finite_weights_and_are_marked(level, old, sampler):
    got = run(torch.tensor([old]), torch.tensor([sampler]), [1], level)
    assert got.weights.isfinite().all()
    assert got.clamped.item() is (old != sampler)


def test_nan_is_not_masked_away():
    got = run(torch.tensor([math.nan]), torch.zeros(1), [1], "token", "mask", 0.5)
    assert got.weights.isnan().all()
