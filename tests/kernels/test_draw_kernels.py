"""Tokens drawn by kernels: the distribution, its ends, what is never drawn, and that a row is its own."""

import pytest
import torch
from kernel_oracles import draw_reference
from qarl_kernels.draw import TILE, draw
from qarl_kernels.logprob import Truncation, truncate_
from torch import Tensor

EDGES = [0.0, 5e-324, 2.0**-53, 1 - 2.0**-53, 1.0]
SIZES = [1, 12, TILE, TILE + 1, 3 * TILE - 5]


def random_logits(rows: int, vocabulary: int, device: torch.device, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    return (spread * torch.randn(rows, vocabulary, generator=generator)).to(device)


def uniform(count: int, device: torch.device) -> Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count)).to(device)


def drawn(logits: Tensor, points: Tensor) -> Tensor:
    return draw(logits, logits.logsumexp(-1), points)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("vocabulary", SIZES)
def test_tokens_are_those_of_float64_and_of_the_definition(device, vocabulary: int) -> None:
    logits, points = random_logits(33, vocabulary, device), uniform(33, device)
    exact = logits.double().softmax(-1).cumsum(-1)
    expected = (exact <= points[:, None] * exact[:, -1:]).sum(-1)
    found = drawn(logits, points)
    # one float32 exponential may be off by an ulp; no point lies so near to a boundary here
    assert found.tolist() == expected.tolist()
    assert found.tolist() == draw_reference(logits, logits.logsumexp(-1), points).tolist()


def test_no_rows_draw_no_tokens(device) -> None:
    assert drawn(torch.empty(0, 50, device=device), torch.empty(0, dtype=torch.float64, device=device)).shape == (0,)


def test_rows_may_lie_apart_and_draw_the_same_in_any_batch(device) -> None:
    wide = random_logits(9, TILE + 300, device)
    logits, points = wide[:, : TILE + 100], uniform(9, device)
    lse = logits.logsumexp(-1)
    together = draw(logits, lse, points)
    assert together.tolist() == draw(logits.contiguous(), lse, points).tolist()
    assert together.tolist() == [int(draw(logits[i : i + 1], lse[i : i + 1], points[i : i + 1])) for i in range(9)]


@pytest.mark.parametrize(
    "truncation", [Truncation(top_k=3), Truncation(top_p=0.6), Truncation(min_p=0.4), Truncation(0.5, 4, 0.9, 0.1)]
)
def test_truncated_tokens_are_never_drawn(device, truncation: Truncation) -> None:
    logits = random_logits(1, 40, device)
    cut = truncate_(logits, truncation)
    assert cut is not None and 0 < cut.sum() < 40
    points = torch.cat([uniform(50, device), torch.tensor(EDGES, dtype=torch.float64, device=device)])
    assert not cut[0][drawn(logits.expand(len(points), -1), points)].any()


@pytest.mark.parametrize("far", [-50.0, float("-inf")])
@pytest.mark.parametrize("size", [8, 2 * TILE, 9 * TILE])
def test_the_ends_of_the_unit_interval_draw_kept_tokens(device, far: float, size: int) -> None:
    logits = torch.full((len(EDGES), size), far, device=device)
    middle = size // 2  # the kept tokens are in two tiles
    logits[:, middle - 1 : middle + 2] = torch.tensor([0.0, -0.1, -0.2], device=device)
    points = torch.tensor(EDGES, dtype=torch.float64, device=device)
    assert drawn(logits, points).tolist() == [middle - 1] * 3 + [middle + 1] * 2


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_no_distribution_gives_a_token_of_the_vocabulary(device, bad: float) -> None:
    logits = random_logits(3, TILE + 7, device)
    points = uniform(3, device)
    expected = drawn(logits, points)
    logits[1, 5] = bad
    found = drawn(logits, points)
    assert found[1] == 0 and found[0] == expected[0] and found[2] == expected[2]
