import math

import numpy as np
import pytest
import torch
from qarl_kernels.logprob import Truncation, log_probs_of

from qarl.rollout.native.plain import sample_tokens
from qarl.rollout.sequence import uniforms


def counts_of(log_probs: torch.Tensor, draws: int, seed: int = 0) -> np.ndarray:
    rows = log_probs.expand(draws, -1)
    return torch.bincount(
        sample_tokens(rows, uniforms(seed, 0, 0, draws).tolist()), minlength=log_probs.numel()
    ).numpy()


def test_samples_follow_the_distribution():
    draws = 20_000
    log_probs = torch.log_softmax(torch.randn(1, 12, generator=torch.Generator().manual_seed(0)), -1)
    expected = log_probs[0].double().exp().numpy() * draws
    chi_square = float(((counts_of(log_probs, draws) - expected) ** 2 / expected).sum())
    assert chi_square < 31.3  # 0.1 % quantile at 11 degrees of freedom


@pytest.mark.parametrize(
    "truncation", [Truncation(top_k=3), Truncation(top_p=0.6), Truncation(min_p=0.4), Truncation(0.5, 4, 0.9, 0.1)]
)
def test_truncated_tokens_are_never_drawn(truncation: Truncation):
    log_probs = log_probs_of(torch.randn(1, 40, generator=torch.Generator().manual_seed(1)), truncation)
    cut = (log_probs[0] < -40).numpy()
    assert 0 < cut.sum() < 40 and counts_of(log_probs, 5000)[cut].sum() == 0


@pytest.mark.parametrize("point", [0.0, 2.0**-53, 1 - 2.0**-53, 1.0])
@pytest.mark.parametrize("size", [8, 400_000])
def test_the_ends_of_the_unit_interval_sample_kept_tokens(point: float, size: int):
    logits = torch.full((1, size), -50.0)
    logits[0, size // 2 - 1 : size // 2 + 2] = torch.tensor([0.0, -0.1, -0.2])
    token = int(sample_tokens(torch.log_softmax(logits, -1), [point]))
    assert token == (size // 2 - 1 if point < 0.5 else size // 2 + 1)
    impossible = torch.full((1, 5), -math.inf)
    impossible[0, 2] = 0.0
    assert int(sample_tokens(impossible, [point])) == 2


def test_a_longer_stream_begins_with_the_shorter_one():
    assert np.array_equal(uniforms(1, 2, 3, 100)[:7], uniforms(1, 2, 3, 7))


@pytest.mark.parametrize("other", [(2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2)])
def test_seed_prompt_and_sample_each_give_another_stream(other: tuple[int, int, int]):
    assert not np.isin(uniforms(*other, 50), uniforms(1, 2, 3, 50)).any()


def test_the_stream_lies_in_the_half_open_unit_interval_and_is_uniform():
    numbers = uniforms(2**63, 2**40, 0, 20_000)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8  # 0.1 % at 19 degrees of freedom


def test_the_stream_is_pinned():
    """A run that is resumed with a later version must draw the same numbers."""
    assert uniforms(0, 0, 0, 2).tolist() == [0.011546754286331562, 0.24154919656271812]
