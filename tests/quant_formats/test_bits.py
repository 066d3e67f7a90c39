"""Comparison of tensors by bytes: one pair, and many pairs with a single synchronization."""

import pytest
import torch
from qarl_formats.bits import Proof, same_bits
from torch import Tensor

WORDS = torch.arange(24, dtype=torch.int32)
EIGHTH = torch.arange(9).to(torch.float8_e4m3fn)
PAIRS = {
    "a copy": (WORDS, WORDS.clone(), True),
    "another value": (WORDS, WORDS + (WORDS == 23), False),
    "another shape": (WORDS, WORDS.view(4, 6), False),
    "another dtype": (WORDS, WORDS.view(torch.float32), False),
    "transposed": (WORDS.view(4, 6), WORDS.view(4, 6).t().contiguous().t(), True),
    "both zeros": (torch.zeros(3), -torch.zeros(3), False),
    "the same NaN": (torch.full((3,), torch.nan), torch.full((3,), torch.nan), True),
    "FP8 at an odd offset": (EIGHTH[1:], EIGHTH[1:].clone(), True),
    "nothing": (torch.empty(0, 4), torch.empty(0, 4), True),
}


@pytest.mark.parametrize(("a", "b", "same"), PAIRS.values(), ids=PAIRS)
def test_bytes_are_compared_and_not_values(a: Tensor, b: Tensor, same: bool) -> None:
    assert same_bits(a, b) is same


def test_the_first_that_differs_is_named_with_its_place_and_the_next_proof_begins_anew() -> None:
    proof = Proof()
    proof.of("q: ").add("scale", WORDS, WORDS.clone())
    proof.of("k: ").add("weight", WORDS, WORDS + 1)
    proof.of("v: ").add("weight", WORDS, WORDS.view(4, 6))
    with pytest.raises(ValueError, match=r"^k: weight$"):
        proof.settle()
    proof.add("weight", WORDS, WORDS.clone())
    proof.settle()
