import math

import pytest
import torch

from qarl.diagnostics.mismatch import mismatch_metrics
from qarl.objectives.segments import Segments

LENGTHS = [3, 0, 1, 5]


def transcription(old: torch.Tensor, sampler: torch.Tensor) -> dict[str, float]:
    deltas = [o - b for o, b in zip(old.double().tolist(), sampler.double().tolist(), strict=True)]
    sums = [math.fsum(part.tolist()) for part in torch.tensor(deltas, dtype=torch.float64).split(LENGTHS) if len(part)]
    n = len(deltas)
    ppl_learner = math.exp(-math.fsum(old.double().tolist()) / n)
    ppl_sampler = math.exp(-math.fsum(sampler.double().tolist()) / n)
    return {
        "mismatch/delta_abs_mean": math.fsum(map(abs, deltas)) / n,
        "mismatch/delta_abs_max": max(map(abs, deltas)),
        "mismatch/k1": -math.fsum(deltas) / n,
        "mismatch/k3": math.fsum(math.exp(d) - 1 - d for d in deltas) / n,
        "mismatch/ppl_ratio": ppl_learner / ppl_sampler,
        "mismatch/chi2_token": math.fsum(math.exp(2 * d) for d in deltas) / n - 1,
        "mismatch/chi2_seq": math.fsum(math.exp(2 * s) for s in sums) / len(sums) - 1,
        "mismatch/clamped_frac": 0.0,
    }


@pytest.mark.parametrize("spread", [0.001, 0.3, 1.0])
def test_matches_the_formulas(spread):
    generator = torch.Generator().manual_seed(3)
    sampler = -torch.rand(9, generator=generator) * 3
    old = sampler + spread * torch.randn(9, generator=generator)
    got = mismatch_metrics(old, sampler, Segments.from_lengths(LENGTHS))
    # the transcription's "- 1" costs float64 rounding of 1
    assert got == pytest.approx(transcription(old, sampler), rel=1e-12, abs=1e-14)


def test_equal_log_probs_are_exactly_no_mismatch():
    logp = torch.tensor([-0.1, -7.3, -math.inf, -0.2])
    metrics = mismatch_metrics(logp, logp.clone(), Segments.from_lengths([2, 0, 2]))
    assert metrics.pop("mismatch/ppl_ratio") == 1.0
    assert set(metrics.values()) == {0.0}
    assert all(math.copysign(1.0, value) == 1.0 for value in metrics.values())  # no -0.0 in the log


def test_the_learner_being_surer_gives_a_perplexity_ratio_below_one_and_a_negative_k1():
    metrics = mismatch_metrics(torch.tensor([-1.0]), torch.tensor([-2.0]), Segments.from_lengths([1]))
    assert metrics["mismatch/ppl_ratio"] == pytest.approx(math.exp(-1.0))
    assert metrics["mismatch/k1"] == -1.0


@pytest.mark.parametrize(("old", "sampler", "sign"), [(-math.inf, -1.0, -1), (-1.0, -math.inf, 1)])
def test_an_infinite_log_prob_enters_as_20_and_is_counted(old, sampler, sign):
    metrics = mismatch_metrics(
        torch.tensor([old, -1.0, -1.0]), torch.tensor([sampler, -1.0, -1.0]), Segments.from_lengths([2, 1])
    )
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["mismatch/delta_abs_max"] == 20.0
    assert metrics["mismatch/k1"] == pytest.approx(-sign * 20.0 / 3)
    assert metrics["mismatch/clamped_frac"] == 0.5


def test_a_long_response_whose_sum_leaves_the_range_is_clamped_and_counted():
    metrics = mismatch_metrics(torch.zeros(30), torch.full((30,), -1.0), Segments.from_lengths([5, 25]))
    assert metrics["mismatch/clamped_frac"] == 0.5
    assert metrics["mismatch/chi2_seq"] == pytest.approx((math.expm1(10.0) + math.expm1(20.0)) / 2)


def test_small_mismatches_keep_their_digits():
    delta = 2.0**-40
    metrics = mismatch_metrics(
        torch.tensor([delta], dtype=torch.float64), torch.zeros(1, dtype=torch.float64), Segments.from_lengths([1])
    )
    assert metrics["mismatch/chi2_token"] == pytest.approx(2 * delta, rel=1e-11)


def test_a_batch_without_tokens_has_no_mismatch():
    metrics = mismatch_metrics(torch.zeros(0), torch.zeros(0), Segments.from_lengths([0]))
    assert metrics.pop("mismatch/ppl_ratio") == 1.0
    assert set(metrics.values()) == {0.0}
