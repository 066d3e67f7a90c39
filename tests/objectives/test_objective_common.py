"""Log ratios, statistics, and sums and means over responses."""

import math

import pytest
import torch

from qarl.objectives.common import clamped_exp, k_estimate, log_ratio
from qarl.objectives.segments import Segments, Totals, aggregate

INF = math.inf


def test_equal_infinities_have_log_ratio_zero_and_opposite_ones_of_a_response_cancel():
    assert log_ratio(torch.tensor([-INF]), torch.tensor([-INF])).item() == 0.0
    exponent = log_ratio(torch.tensor([-INF, -1.0]), torch.tensor([-1.0, -INF]))
    assert clamped_exp(Segments.from_lengths([2]).mean(exponent))[0].item() == 1.0


def test_an_infinite_log_ratio_is_finite_and_clamps_the_mean_of_its_response():
    logp, reference = torch.tensor([-INF] + [-1.0] * 4095), torch.full((4096,), -1.0)
    ratio, clamped = clamped_exp(Segments.from_lengths([4096]).mean(log_ratio(logp, reference)))
    assert ratio.item() == pytest.approx(math.exp(-20), rel=1e-6)
    assert clamped.item()


@pytest.mark.parametrize(("exponent", "clamped"), [(20.0, False), (20.5, True), (-20.0, False), (-21.0, True)])
def test_exponents_are_clamped_beyond_20_only(exponent, clamped):
    ratio, was_clamped = clamped_exp(torch.tensor([exponent], dtype=torch.float64))
    assert was_clamped.item() is clamped
    assert ratio.item() == pytest.approx(math.exp(max(-20.0, min(20.0, exponent))), rel=1e-15)


def test_k3_of_a_tiny_float32_ratio_is_not_lost_to_cancellation():
    # exp(x) - 1 - x in float32 would be 0 or 1e-7; the series is x^2 / 2
    assert k_estimate(torch.tensor([1e-2]), "k3").item() == pytest.approx(5.0167e-5, rel=1e-4)


# --- responses


def test_sum_of_a_response_is_bit_equal_whatever_it_is_packed_with():
    lengths = [33, 700, 1, 0, 129]
    x = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(1))
    together = Segments.from_lengths(lengths).sum(x)
    alone = torch.cat([Segments.from_lengths([n]).sum(part) for n, part in zip(lengths, x.split(lengths), strict=True)])
    assert torch.equal(together, alone)


def test_responses_without_tokens_have_sum_and_mean_zero():
    segments = Segments.from_lengths([0, 0])
    assert segments.sum(torch.zeros(0)).tolist() == segments.mean(torch.zeros(0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("seq-mean-token-mean", (2.0 + 0.0 + 5.0 - 8.0) / 4),
        ("token-mean", 11.0 / 6),
        ("seq-mean-token-sum", (4.0 + 0.0 + 15.0 - 8.0) / 4),
        ("seq-mean-token-sum-norm", (4.0 + 0.0 + 15.0 - 8.0) / 4 / 16),
    ],
)
def test_an_aggregation_matches_its_name(mode, expected):
    value = torch.tensor([1.0, 3.0, 2.0, 4.0, 9.0, -8.0]).double()
    got = aggregate(value, Segments.from_lengths([2, 0, 3, 1]), mode, Totals(4, 6, 16))
    assert got.item() == pytest.approx(expected, rel=1e-15)
