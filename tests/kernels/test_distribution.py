"""The sampling distribution: its log-probs have the bits of the learner's, by kernels and in plain torch."""

import math

import pytest
import torch
from products import random
from qarl_kernels import head
from qarl_kernels.head import FusedTokenLogProbs, fused_distribution
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.logprob import (
    CUT_LOGIT_GAP,
    Distribution,
    Truncation,
    distribution,
    logits_of,
    token_logprobs,
    truncate_,
)
from qarl_kernels.truncation import normalized
from qarl_kernels.tuning import Tile
from running import NEEDS_TRITON, QUIET
from torch import Tensor

UNRANKED = [Truncation(), Truncation(0.7), Truncation(0.0), Truncation(min_p=0.05), Truncation(1.3, min_p=0.02)]
RANKED = [Truncation(top_k=5), Truncation(0.8, top_p=0.9), Truncation(top_k=20, top_p=0.8, min_p=0.01)]
# (rows, vocabulary, features): one tile and a bit, one row, whole tiles, rows of logits and features that only pointers
# can read
SHAPES = [(37, 301, 48), (1, 61, 16), (64, 256, 32), (5, 259, 20)]

pytestmark = [pytest.mark.usefixtures("poisoned"), QUIET]


@pytest.fixture(autouse=True)
def tiles_of_its_size(monkeypatch) -> None:
    """The interpreter has tiles of which the small cases here make several."""
    if INTERPRETED:
        monkeypatch.setattr(head, "STATISTICS_TILE", Tile("x_first", 64, 64, 16))
        monkeypatch.setattr(head, "POINTERS", Tile("x_first", 16, 32, 16))


def _case(rows: int, vocabulary: int, features: int, device: torch.device, dtype=torch.bfloat16) -> tuple[Tensor, ...]:
    hidden = random(rows, features, seed=1, device=device, dtype=dtype)
    weight = (random(vocabulary, features, seed=2, device=device) * (2.5 / math.sqrt(features))).to(dtype)
    return hidden, weight


def _check(found: Distribution, of_token, truncation: Truncation, logits: Tensor, vocabulary: int) -> None:
    """of_token: the learner's log-probs of tokens (R,). logits: near to those that were truncated."""
    rows = logits.shape[0]
    every = found.all_logprobs()
    assert every.shape == found.logits.shape == (rows, vocabulary) and found.lse.shape == (rows,)
    cut = torch.isneginf(every)
    assert cut.any() == truncation.active, "the cases cut tokens"
    top = found.logits.amax(-1, keepdim=True)
    assert torch.equal(found.logits == top - CUT_LOGIT_GAP, cut)
    torch.testing.assert_close(found.logits[~cut], logits[~cut], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, torch.logsumexp(found.logits.double(), -1).float(), rtol=1e-5, atol=1e-5)
    step = max(1, vocabulary // 8)
    for first in range(0, vocabulary, step):
        tokens = torch.arange(first, first + rows, device=logits.device) * 7 % vocabulary
        expected = of_token(tokens)
        assert torch.equal(found.logprobs(tokens), expected)
        assert torch.equal(every.gather(-1, tokens[:, None])[:, 0], expected)


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("rows", "vocabulary", "features", "truncation"),
    [(*SHAPES[0], truncation) for truncation in UNRANKED] + [(*shape, UNRANKED[-1]) for shape in SHAPES[1:]],
    ids=str,
)
def test_tiles_of_the_vocabulary(device, rows, vocabulary, features, truncation) -> None:
    hidden, weight = _case(rows, vocabulary, features, device, torch.float16 if rows == 5 else torch.bfloat16)
    logits = logits_of(hidden, weight.float() if device.type == "cpu" else weight)
    truncate_(logits, truncation)
    found = fused_distribution(hidden, weight, truncation)
    _check(
        found,
        lambda tokens: FusedTokenLogProbs.apply(hidden, None, weight, tokens, truncation, None, None)[0],
        truncation,
        logits,
        vocabulary,
    )


@NEEDS_TRITON
@pytest.mark.parametrize("truncation", [Truncation(0.7), Truncation(min_p=0.05)], ids=str)
def test_a_rows_bits_are_its_own(device, monkeypatch, truncation) -> None:
    hidden, weight = _case(150, 301, 16, device)
    whole = fused_distribution(hidden, weight, truncation)

    def assert_same(part: slice) -> None:
        found = fused_distribution(hidden[part], weight, truncation)
        assert torch.equal(found.logits, whole.logits[part])
        assert torch.equal(found.all_logprobs(), whole.all_logprobs()[part])

    for part in (slice(0, 1), slice(37, 39), slice(11, 141), slice(5, 5)):
        assert_same(part)
    monkeypatch.setattr(head, "PARTIAL", 1)  # rows go by in blocks of 128
    assert_same(slice(0, 150))


@pytest.mark.parametrize("truncation", [*UNRANKED, *RANKED], ids=str)
@pytest.mark.parametrize("kernels", [False, True])
def test_the_distribution_agrees_with_the_learners_log_probs(device, kernels, truncation) -> None:
    hidden, weight = _case(37, 301, 48, device)
    weight = weight.float() if device.type == "cpu" else weight
    logits = logits_of(hidden, weight, kernels)
    truncate_(logits, truncation)
    _check(
        distribution(hidden, weight, truncation, kernels),
        lambda tokens: token_logprobs(hidden, None, weight, tokens, truncation, 9, kernels)[0],
        truncation,
        logits,
        301,
    )


@NEEDS_TRITON
def test_a_min_p_that_cuts_next_to_nothing(device) -> None:
    hidden, weight = _case(5, 301, 48, device)
    found = fused_distribution(hidden, weight * 40, Truncation(min_p=1e-40))
    every = found.all_logprobs()
    tokens = every.argmin(-1)
    assert torch.isneginf(every).any() and torch.isneginf(found.logprobs(tokens)).any()
    expected, _ = FusedTokenLogProbs.apply(hidden, None, weight * 40, tokens, Truncation(min_p=1e-40), None, None)
    assert torch.equal(found.logprobs(tokens), expected)


@NEEDS_TRITON
def test_a_row_that_is_not_finite_spoils_only_itself(device) -> None:
    hidden, weight = _case(37, 301, 48, device)
    expected = fused_distribution(hidden, weight, Truncation(min_p=0.05)).all_logprobs()
    hidden[4, 3] = torch.nan
    found = fused_distribution(hidden, weight, Truncation(min_p=0.05)).all_logprobs()
    finite = torch.arange(37, device=device) != 4
    assert found[4].isnan().all() and torch.equal(found[finite], expected[finite])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a row's place counts in a GPU's sums alone")
@pytest.mark.parametrize("vocabulary", [1025, 2050, 4099, 32001])
def test_the_sum_of_a_row_is_its_own_wherever_it_begins(device, vocabulary) -> None:
    logits = 4 * random(9, vocabulary, seed=5, device=device)
    whole = normalized(logits)
    torch.testing.assert_close(whole.double(), logits.double().log_softmax(-1), rtol=1e-6, atol=1e-5)
    lse = Distribution(logits, False).lse
    for row in range(9):
        own = logits[row : row + 1].clone()
        assert torch.equal(normalized(own), whole[row : row + 1])
        assert torch.equal(Distribution(own, False).lse, lse[row : row + 1])
