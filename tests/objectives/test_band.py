import math

import pytest
import torch

from qarl.objectives.base import Band
from qarl.objectives.segments import Segments

TOKEN = Band("token", high=1.25, low=0.75, neg_high=2.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "left"),
    [
        (1.25, 1.0, False),
        (1.26, 1.0, True),
        (0.1, 1.0, False),
        (0.75, -1.0, False),
        (0.74, -1.0, True),
        (1.26, -1.0, False),
        (2.0, -1.0, False),
        (2.1, -1.0, True),
        (9.0, 0.0, False),
        (0.1, 0.0, False),
    ],
)
def test_bounds_are_inside_and_bind_on_the_side_of_the_advantage(ratio, advantage, left):
    log_ratio = torch.tensor([ratio]).log()
    if ratio in (TOKEN.high, TOKEN.low, TOKEN.neg_high):  # exp(log) may round off the edge
        edge = log_ratio.exp().item()
        band = Band("token", **{name: edge for name in ("high", "low", "neg_high")})
    else:
        band = TOKEN
    outside = band.outside(log_ratio, torch.tensor([advantage]), Segments.from_lengths([1]))
    assert outside.item() is left


def test_a_token_band_looks_at_each_token_with_its_response_s_advantage():
    log_ratio = torch.tensor([1.5, 1.0, 1.5, 0.5]).log()
    outside = TOKEN.outside(log_ratio, torch.tensor([1.0, -1.0]), Segments.from_lengths([2, 2]))
    assert outside.tolist() == [True, False, False, True]


def test_a_sequence_band_looks_at_the_geometric_mean_of_the_response():
    band = Band("sequence", high=1.25, low=0.75)
    log_ratio = torch.tensor([4.0, 0.5, 4.0, 0.2, 3.0]).log()  # geometric means sqrt(2), sqrt(0.8), and 3
    outside = band.outside(log_ratio, torch.tensor([1.0, -1.0, 5.0, -1.0]), Segments.from_lengths([2, 2, 0, 1]))
    assert outside.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_infinite_log_ratio_is_outside_where_a_bound_is_finite(level):
    band = Band(level, high=1.25, low=0.75)
    segments = Segments.from_lengths([1, 1, 1, 1])
    outside = band.outside(torch.tensor([1e12, -1e12, 1e12, -1e12]), torch.tensor([1.0, 1.0, -1.0, -1.0]), segments)
    assert outside.tolist() == [True, False, False, True]
    assert Band(level, math.inf, 0.0).outside(torch.zeros(0), torch.zeros(1), Segments.from_lengths([0])).shape == (0,)
