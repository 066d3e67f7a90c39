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
from torch import Tensor

UNRANKED = [Truncation(), Truncation(0.0), Truncation(1.3, min_p=0.02)]
RANKED = [Truncation(0.8, top_p=0.9), Truncation(top_k=20, top_p=0.8, min_p=0.01)]
# (rows, vocabulary, features): one tile and a bit, whole tiles, rows of logits and features that only pointers can read
SHAPES = [(37, 301, 48), (64, 256, 32), (5, 259, 20)]

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
def test_a_rows_bits_are_its_own(device, monkeypatch) -> None:
    hidden, weight = _case(150, 130, 16, device)

    def found(hidden: Tensor) -> tuple[Tensor, Tensor]:
        made = fused_distribution(hidden, weight, Truncation(0.7, min_p=0.05))
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
