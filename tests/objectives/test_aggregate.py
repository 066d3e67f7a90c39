import pytest
import torch

from qarl.objectives.segments import Segments, Totals, aggregate

LENGTHS = [2, 0, 3, 1]
VALUE = [1.0, 3.0, 2.0, 4.0, 9.0, -8.0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("seq-mean-token-mean", (2.0 + 0.0 + 5.0 - 8.0) / 4),
        ("token-mean", 11.0 / 6),
        ("seq-mean-token-sum", (4.0 + 0.0 + 15.0 - 8.0) / 4),
        ("seq-mean-token-sum-norm", (4.0 + 0.0 + 15.0 - 8.0) / 4 / 16),
    ],
)
def test_matches_its_name(mode, expected):
    got = aggregate(torch.tensor(VALUE).double(), Segments.from_lengths(LENGTHS), mode, Totals(4, 6, 16))
    assert got.item() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_a_micro_batch_of_empty_responses_gives_zero(mode):
    value = torch.zeros(0, requires_grad=True)
    share = aggregate(value, Segments.from_lengths([0, 0]), mode, Totals(4, 6, 16))
    share.backward()
    assert share.item() == 0.0
