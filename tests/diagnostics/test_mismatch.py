import math
import statistics

import pytest
import torch

from qarl.diagnostics.mismatch import gap_tables, mismatch_metrics, probability_deciles
from qarl.objectives.segments import Segments

LENGTHS = [3, 0, 1, 5]


def transcription(old: torch.Tensor, sampler: torch.Tensor) -> dict[str, float]:
    deltas = [o - b for o, b in zip(old.double().tolist(), sampler.double().tolist(), strict=True)]
    sums = [math.fsum(part.tolist()) for part in torch.tensor(deltas, dtype=torch.float64).split(LENGTHS) if len(part)]
    n = len(deltas)
    ppl_learner = math.exp(-math.fsum(old.double().tolist()) / n)
    ppl_sampler = math.exp(-math.fsum(sampler.double().tolist()) / n)
    ordered = sorted(map(abs, deltas))
    weights = [math.exp(d) for d in deltas]
    apart = [
        abs(math.exp(o) - math.exp(b)) for o, b in zip(old.double().tolist(), sampler.double().tolist(), strict=True)
    ]
    return {
        "mismatch/delta_abs_p50": ordered[math.ceil(0.5 * n) - 1],
        "mismatch/delta_abs_p90": ordered[math.ceil(0.9 * n) - 1],
        "mismatch/delta_abs_p99": ordered[-1],
        "mismatch/delta_abs_p999": ordered[-1],
        "mismatch/ppl_learner": ppl_learner,
        "mismatch/ppl_sampler": ppl_sampler,
        "mismatch/ess": math.fsum(weights) ** 2 / math.fsum(w * w for w in weights),
        "mismatch/ess_frac": math.fsum(weights) ** 2 / math.fsum(w * w for w in weights) / n,
        "mismatch/rollout_probs_diff_mean": statistics.fmean(apart),
        "mismatch/rollout_probs_diff_max": max(apart),
        "mismatch/rollout_probs_diff_std": statistics.stdev(apart),
        "mismatch/outside_frac": 0.0,
        "mismatch/delta_abs_mean": math.fsum(map(abs, deltas)) / n,
        "mismatch/delta_abs_max": max(map(abs, deltas)),
        "mismatch/k1": -math.fsum(deltas) / n,
        "mismatch/k3": math.fsum(math.exp(d) - 1 - d for d in deltas) / n,
        "mismatch/ppl_ratio": ppl_learner / ppl_sampler,
        "mismatch/chi2_token": math.fsum(math.exp(2 * d) for d in deltas) / n - 1,
        "mismatch/chi2_seq": math.fsum(math.exp(2 * s) for s in sums) / len(sums) - 1,
        "mismatch/clamped_frac": 0.0,
        "mismatch/k3_inside": math.fsum(math.exp(d) - 1 - d for d in deltas) / n,
        "mismatch/optimal_cap_token": math.sqrt(2 * math.fsum(math.exp(2 * d) for d in deltas) / n),
        "mismatch/optimal_cap_seq": math.sqrt(2 * math.fsum(math.exp(2 * s) for s in sums) / len(sums)),
        "mismatch/tv": math.fsum(abs(1 - math.exp(d)) for d in deltas) / n / 2,
        "mismatch/tv_seq": math.fsum(abs(1 - math.exp(s)) for s in sums) / len(sums) / 2,
        **signed_means(deltas, sampler.double().exp().tolist()),
    }


def signed_means(deltas: list[float], probabilities: list[float]) -> dict[str, float]:
    pairs = list(zip(deltas, probabilities, strict=True))
    parts = {"tail": [d for d, p in pairs if p < 0.1], "head": [d for d, p in pairs if p >= 0.9]}
    return {f"mismatch/{name}_delta_mean": statistics.fmean(part) for name, part in parts.items() if part}


@pytest.mark.parametrize("spread", [0.001, 0.3, 1.0])
def test_matches_the_formulas(spread):
    generator = torch.Generator().manual_seed(3)
    sampler = -torch.rand(9, generator=generator) * 3
    old = sampler + spread * torch.randn(9, generator=generator)
    got = mismatch_metrics(old, sampler, Segments.from_lengths(LENGTHS))
    # the transcription's "- 1" costs float64 rounding of 1; quantiles are of the differences in float32
    assert got == pytest.approx(transcription(old, sampler), rel=1e-7, abs=1e-14)
    exact = {name for name in got if not name.startswith("mismatch/delta_abs_p")}
    assert {n: got[n] for n in exact} == pytest.approx(
        {n: v for n, v in transcription(old, sampler).items() if n in exact}, rel=1e-12, abs=1e-14
    )


def test_equal_log_probs_are_exactly_no_mismatch():
    logp = torch.tensor([-0.1, -7.3, -math.inf, -0.2])
    metrics = mismatch_metrics(logp, logp.clone(), Segments.from_lengths([2, 0, 2]))
    assert metrics.pop("mismatch/ppl_ratio") == 1.0
    assert metrics.pop("mismatch/ess_frac") == 1.0 and metrics.pop("mismatch/ess") == 4.0
    assert metrics.pop("mismatch/outside_frac") == 0.25
    finite = math.exp(sum(logp[[0, 1, 3]].double().neg().tolist()) / 3)
    for side in ("learner", "sampler"):
        assert metrics.pop(f"mismatch/ppl_{side}") == pytest.approx(finite, rel=1e-12)
    for level in ("token", "seq"):
        assert metrics.pop(f"mismatch/optimal_cap_{level}") == pytest.approx(math.sqrt(2.0), rel=1e-15)
    assert set(metrics.values()) == {0.0}
    assert all(math.copysign(1.0, value) == 1.0 for value in metrics.values())  # no -0.0 in the log


@pytest.mark.parametrize(("old", "sampler", "sign"), [(-math.inf, -1.0, -1), (-1.0, -math.inf, 1)])
def test_an_infinite_log_prob_enters_as_20_and_is_counted(old, sampler, sign):
    metrics = mismatch_metrics(
        torch.tensor([old, -1.0, -1.0]), torch.tensor([sampler, -1.0, -1.0]), Segments.from_lengths([2, 1])
    )
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["mismatch/delta_abs_max"] == 20.0
    assert metrics["mismatch/k1"] == pytest.approx(-sign * 20.0 / 3)
    assert metrics["mismatch/clamped_frac"] == 0.5
    assert metrics["mismatch/outside_frac"] == pytest.approx(1 / 3)


def test_small_mismatches_keep_their_digits():
    delta = 2.0**-40
    metrics = mismatch_metrics(
        torch.tensor([delta], dtype=torch.float64), torch.zeros(1, dtype=torch.float64), Segments.from_lengths([1])
    )
    assert metrics["mismatch/chi2_token"] == pytest.approx(2 * delta, rel=1e-11)


def test_one_token_is_not_a_sample_of_a_spread():
    metrics = mismatch_metrics(torch.tensor([-1.0]), torch.tensor([-2.0]), Segments.from_lengths([1]))
    assert metrics["mismatch/rollout_probs_diff_std"] == 0.0
    assert metrics["mismatch/delta_abs_p50"] == metrics["mismatch/delta_abs_p999"] == 1.0


def test_quantiles_are_the_smallest_gap_that_enough_tokens_stay_within():
    gaps = torch.arange(1, 1001) / 1024  # exact in float32
    metrics = mismatch_metrics(gaps.flip(0), torch.zeros(1000), Segments.from_lengths([1000]))
    for name, rank in (("p50", 500), ("p90", 900), ("p99", 990), ("p999", 999)):
        assert metrics[f"mismatch/delta_abs_{name}"] == rank / 1024


def test_deciles_split_by_the_samplers_probability_and_their_bias_is_of_tokens_inside_both_distributions():
    generator = torch.Generator().manual_seed(5)
    sampler = torch.rand(200, generator=generator, dtype=torch.float64).log()
    old = sampler + 0.2 * torch.randn(200, generator=generator, dtype=torch.float64)
    old[torch.rand(200, generator=generator) < 0.1] = -math.inf
    rows = probability_deciles(old, sampler)
    for i, row in enumerate(rows):
        members = [
            (o, b) for o, b in zip(old.tolist(), sampler.tolist(), strict=True) if min(int(math.exp(b) * 10), 9) == i
        ]
        finite = [o - b for o, b in members if math.isfinite(o)]
        assert (row["low"], row["high"], row["count"]) == (i / 10, (i + 1) / 10, len(members))
        gaps = [abs(o - b) if math.isfinite(o) else 20.0 for o, b in members]
        assert row["delta_abs_mean"] == pytest.approx(statistics.fmean(gaps), rel=1e-12)
        assert row["delta_mean"] == (pytest.approx(statistics.fmean(finite), rel=1e-9) if finite else None)


def test_gap_tables_are_means_over_positions_lengths_and_tail_probabilities():
    lengths = [1, 3, 0, 9]
    segments = Segments.from_lengths(lengths)
    generator = torch.Generator().manual_seed(3)
    sampler = -torch.rand(13, generator=generator, dtype=torch.float64) * 20
    old = sampler + torch.randn(13, generator=generator, dtype=torch.float64)
    tables = gap_tables(old, sampler, segments)
    tokens = [(position, length) for length in lengths for position in range(length)]
    places = {
        "positions": [position for position, _ in tokens],
        "lengths": [length for _, length in tokens],
        "tail": sampler.exp().tolist(),
    }
    gaps = (old - sampler).abs().tolist()
    for name, where in places.items():
        assert sum(row["count"] for row in tables[name]) == 13
        for row in tables[name]:
            high = math.inf if row["high"] is None else row["high"]
            inside = [gap for gap, place in zip(gaps, where, strict=True) if row["low"] <= place < high]
            assert row["count"] == len(inside) and row["delta_abs_mean"] == pytest.approx(sum(inside) / len(inside))
    assert [row["low"] for row in tables["positions"]] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert [row["low"] for row in tables["lengths"]] == [1.0, 2.0, 8.0]
    none = torch.zeros(0)
    assert gap_tables(none, none, Segments.from_lengths([0])) == {"positions": [], "lengths": [], "tail": []}
