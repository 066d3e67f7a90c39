"""The sampling distribution: its log-probs have the bits of the learner's, by kernels and in plain torch."""

import math

import pytest
import torch
from kernel_harness import NEEDS_TRITON, QUIET, RUNNABLE, assert_rows_are_their_own
from products import random
from qarl_kernels import head
from qarl_kernels.head import FusedTokenLogProbs, fused_distribution
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
from torch import Tensor

UNRANKED = [Truncation(), Truncation(0.7), Truncation(0.0), Truncation(min_p=0.05), Truncation(1.3, min_p=0.02)]
RANKED = [Truncation(top_k=5), Truncation(0.8, top_p=0.9), Truncation(top_k=20, top_p=0.8, min_p=0.01)]
# (rows, vocabulary, features): one tile and a bit, one row, whole tiles, rows of logits and features that only pointers
# can read
SHAPES = [(37, 301, 48), (1, 61, 16), (64, 256, 32), (5, 259, 20)]

pytestmark = [pytest.mark.usefixtures("poisoned", "small_head"), QUIET]


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
@pytest.mark.parametrize("truncation", [Truncation(0.7), Truncation(min_p=0.05)], ids=str)
def test_a_rows_bits_are_its_own(device, monkeypatch, truncation) -> None:
    hidden, weight = _case(150, 301, 16, device)

    def found(hidden: Tensor) -> tuple[Tensor, Tensor]:
        made = fused_distribution(hidden, weight, truncation)
        return made.logits, made.all_logprobs()

    assert_rows_are_their_own(found, hidden)
    whole = found(hidden)
    monkeypatch.setattr(head, "PARTIAL", 1)  # rows go by in blocks of 128
    assert all(map(torch.equal, found(hidden), whole))


CASES = [
    *((True, *SHAPES[0], truncation) for truncation in UNRANKED),
    *((True, *shape, UNRANKED[-1]) for shape in SHAPES[1:]),
    *((False, *SHAPES[0], truncation) for truncation in UNRANKED + RANKED),
]


@pytest.mark.parametrize(("fused", "rows", "vocabulary", "features", "truncation"), CASES, ids=str)
def test_it_has_the_log_probs_of_the_learner(device, fused, rows, vocabulary, features, truncation) -> None:
    if fused and not RUNNABLE:
        pytest.skip("needs TRITON_INTERPRET=1 or a GPU")
    hidden, weight = _case(rows, vocabulary, features, device, torch.float16 if rows == 5 else torch.bfloat16)
    wide = weight.float() if device.type == "cpu" else weight
    logits = logits_of(hidden, wide)
    truncate_(logits, truncation)

    def learner(tokens: Tensor) -> Tensor:
        if fused:
            return FusedTokenLogProbs.apply(hidden, None, weight, tokens, truncation, None, None)[0]
        return token_logprobs(hidden, None, wide, tokens, truncation, 9)[0]

    found = fused_distribution(hidden, weight, truncation) if fused else distribution(hidden, wide, truncation)
    _check(found, learner, truncation, logits, vocabulary)


@NEEDS_TRITON
def test_a_min_p_that_cuts_next_to_nothing(device) -> None:
    hidden, weight = _case(5, 301, 48, device)
    found = fused_distribution(hidden, weight * 40, Truncation(min_p=1e-40))
    every = found.all_logprobs()
    tokens = every.argmin(-1)
    assert torch.isneginf(every).any() and torch.isneginf(found.logprobs(tokens)).any()
    expected, _ = FusedTokenLogProbs.apply(hidden, None, weight * 40, tokens, Truncation(min_p=1e-40), None, None)
    assert torch.equal(found.logprobs(tokens), expected)


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
