import pytest
import torch

from qarl.objectives.segments import Segments, Totals, aggregate


def test_index_and_position_follow_the_packing_order():
    segments = Segments.from_lengths([2, 0, 3])
    assert segments.index.tolist() == [0, 0, 2, 2, 2]
    assert segments.position.tolist() == [0, 1, 0, 1, 2]
    assert segments.max_length == 3


def test_sum_matches_a_float64_loop():
    lengths = [5, 0, 1, 37, 64, 2]
    x = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = [float(sum(part.tolist())) for part in x.split(lengths)]
    # float64 rounding of at most 64 additions of values of order 1
    torch.testing.assert_close(
        Segments.from_lengths(lengths).sum(x), torch.tensor(expected, dtype=torch.float64), atol=1e-13, rtol=0
    )


def test_mean_of_an_empty_response_is_zero():
    mean = Segments.from_lengths([0, 2, 0]).mean(torch.tensor([1.0, 3.0]))
    assert mean.tolist() == [0.0, 2.0, 0.0]


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_pack_without_tokens_sums_to_zeros(lengths):
    assert Segments.from_lengths(lengths).sum(torch.zeros(0)).tolist() == [0.0] * len(lengths)


def test_sum_of_a_response_is_bit_equal_whatever_it_is_packed_with():
    lengths = [33, 700, 1, 0, 129]
    x = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(1))
    together = Segments.from_lengths(lengths).sum(x)
    alone = torch.cat([Segments.from_lengths([n]).sum(part) for n, part in zip(lengths, x.split(lengths), strict=True)])
    assert torch.equal(together, alone)


def test_sum_backward_gives_each_token_the_gradient_of_its_response():
    segments = Segments.from_lengths([3, 0, 2])
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    (segments.sum(x) * torch.tensor([2.0, 7.0, 5.0], dtype=torch.float64)).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0, 5.0, 5.0]


def test_expand_repeats_each_response_over_its_tokens():
    assert Segments.from_lengths([1, 0, 2]).expand(torch.tensor([4.0, 5.0, 6.0])).tolist() == [4.0, 6.0, 6.0]


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


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_a_micro_batch_of_empty_responses_gives_zero(mode):
    value = torch.zeros(0, requires_grad=True)
    share = aggregate(value, Segments.from_lengths([0, 0]), mode, Totals(4, 6, 16))
    share.backward()
    assert share.item() == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sum_is_bit_equal_on_cpu_and_gpu():
    lengths = [1000, 3, 0, 511]
    x = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(2))
    on_gpu = Segments.from_lengths(lengths, device="cuda").sum(x.cuda())
    assert torch.equal(on_gpu.cpu(), Segments.from_lengths(lengths).sum(x))
