import math
import random
import statistics

import pytest
import torch

from qarl.diagnostics.precision import deployed_metrics, precision_metrics
from qarl.objectives.base import Band
from qarl.objectives.segments import Segments

LENGTHS = [4, 0, 1, 6, 5]
ADVANTAGES = torch.tensor([1.0, 2.0, -0.5, -1.5, 0.0])
BAND = Band("token", high=1.2, low=0.8)


def sample(seed: int = 0, beta: float = 0.2):
    generator = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    sampler = -torch.rand(n, generator=generator) * 3
    shadow = sampler + 0.15 * torch.randn(n, generator=generator)
    return shadow + beta * torch.randn(n, generator=generator), shadow, sampler


def correlation(x: list[float], y: list[float]) -> float:
    mx, my = statistics.fmean(x), statistics.fmean(y)
    top = math.fsum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return top / math.sqrt(math.fsum((a - mx) ** 2 for a in x) * math.fsum((b - my) ** 2 for b in y))


def test_matches_the_formulas():
    logp, shadow, sampler = sample(beta=0.6)
    segments = Segments.from_lengths(LENGTHS)
    ends = torch.arange(sum(LENGTHS)) % 5 == 3
    got = precision_metrics(logp, shadow, sampler, logp - sampler, ADVANTAGES, segments, BAND, ends)
    l, q, b = (x.double().tolist() for x in (logp, shadow, sampler))  # noqa: E741
    advantage = [a for a, n in zip(ADVANTAGES.tolist(), LENGTHS, strict=True) for _ in range(n)]
    alpha = [y - z for y, z in zip(q, b, strict=True)]
    beta = [x - y for x, y in zip(l, q, strict=True)]
    n = len(beta)

    def outside(exponent: float, a: float) -> bool:
        return (a > 0 and math.exp(exponent) > 1.2) or (a < 0 and math.exp(exponent) < 0.8)

    def beyond(exponent: float) -> bool:
        return not 0.8 <= math.exp(exponent) <= 1.2

    phantom = [beyond(x + y) and not beyond(x) for x, y in zip(alpha, beta, strict=True)]
    lost = [p and outside(x + y, a) for p, x, y, a in zip(phantom, alpha, beta, advantage, strict=True)]
    parts = {}
    for name, wanted in (("eos", True), ("rest", False)):
        rows = [(x, y, p) for x, y, p, end in zip(alpha, beta, phantom, ends.tolist(), strict=True) if end == wanted]
        parts |= {
            f"precision/{name}_alpha_abs_mean": statistics.fmean(abs(x) for x, _, _ in rows),
            f"precision/{name}_beta_abs_mean": statistics.fmean(abs(y) for _, y, _ in rows),
            f"precision/{name}_beta_mean": statistics.fmean(y for _, y, _ in rows),
            f"precision/{name}_beta_std": statistics.pstdev(y for _, y, _ in rows),
            f"precision/{name}_phantom_frac": statistics.fmean(p for _, _, p in rows),
        }
    for low, high in ((math.inf, 20), (20, 10), (10, 5), (5, 2), (2, 0.5), (0.5, 0)):
        found = [abs(y) for x, y in zip(l, beta, strict=True) if -low <= x < -high or (high == 0 and -low <= x)]
        if found:
            parts[f"precision/beta_abs_logp_{low:g}_{high:g}"] = statistics.fmean(found)
    assert sum("beta_abs_logp" in name for name in parts) > 2
    assert got == pytest.approx(
        {
            "precision/alpha_abs_mean": math.fsum(map(abs, alpha)) / n,
            "precision/beta_abs_mean": math.fsum(map(abs, beta)) / n,
            "precision/beta_abs_max": max(map(abs, beta)),
            "precision/beta_mean": statistics.fmean(beta),
            "precision/beta_std": statistics.stdev(beta),
            "precision/snr": math.fsum(map(abs, alpha)) / math.fsum(map(abs, beta)),
            "precision/beta_advantage_corr": correlation(beta, advantage),
            "precision/ratio_off_10_frac": sum(abs(math.exp(x) - 1) > 0.1 for x in beta) / n,
            "precision/ratio_off_50_frac": sum(abs(math.exp(x) - 1) > 0.5 for x in beta) / n,
            "precision/beta_advantage_mean": math.fsum(y * a for y, a in zip(beta, advantage, strict=True)) / n,
            "precision/clipped_frac": sum(map(beyond, alpha)) / n,
            "precision/clipped_lost_frac": sum(outside(x, a) for x, a in zip(alpha, advantage, strict=True)) / n,
            "precision/phantom_frac": sum(phantom) / n,
            "precision/phantom_lost_frac": sum(lost) / n,
            "precision/outside_frac": 0.0,
            "precision/eos_frac": sum(ends.tolist()) / n,
            **parts,
        },
        rel=1e-12,
    )
    assert 0 < got["precision/phantom_lost_frac"] < got["precision/phantom_frac"]  # the sample has both kinds
    assert 0 < got["precision/clipped_lost_frac"] < got["precision/clipped_frac"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_count_is_that_of_a_loop_over_tokens(seed, level):
    draw = random.Random(f"{level}-{seed}")
    lengths = [draw.randrange(4) for _ in range(12)]
    high, low = 1 + draw.uniform(0.01, 0.4), 1 - draw.uniform(0.01, 0.4)
    band = Band(level, high, low, draw.choice([math.inf, high + draw.uniform(0, 2)]))
    n = sum(lengths)
    logp, shadow, sampler = (torch.tensor([draw.gauss(-1, 0.3) for _ in range(n)]).double() for _ in range(3))
    advantages = [draw.choice([-1.3, 0.0, 0.4, 2.0]) for _ in lengths]
    log_ratio = draw.choice([logp - sampler, logp - shadow, torch.zeros(n).double()])
    got = precision_metrics(
        logp, shadow, sampler, log_ratio, torch.tensor(advantages).double(), Segments.from_lengths(lengths), band
    )
    counts = dict.fromkeys(["clipped", "clipped_lost", "phantom", "phantom_lost"], 0)
    start = 0
    for length, a in zip(lengths, advantages, strict=True):
        rows = range(start, start + length)
        start += length
        for t in rows:
            pick = rows if level == "sequence" else [t]
            clean, full = (math.exp(sum(float(x[i]) for i in pick) / len(pick)) for x in (shadow - sampler, log_ratio))

            def lost(r: float) -> bool:
                return r > high if a > 0 else a < 0 and (r < low or r > band.neg_high)  # noqa: B023

            phantom = not low <= full <= high and low <= clean <= high
            counts["clipped"] += not low <= clean <= high
            counts["clipped_lost"] += lost(clean)
            counts["phantom"] += phantom
            counts["phantom_lost"] += phantom and lost(full)
    expected = {f"precision/{name}_frac": count / max(n, 1) for name, count in counts.items()}
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_token_outside_a_distribution_is_counted_and_changes_no_mean(which):
    columns = [torch.tensor([-1.0, -2.0, -0.5]) + 0.1 * i for i in range(3)]
    kept = [x[[0, 2]] for x in columns]
    columns[which][1] = -math.inf
    advantages = torch.tensor([1.0])
    with_it = precision_metrics(*columns, torch.zeros(3), advantages, Segments.from_lengths([3]), BAND)
    without = precision_metrics(*kept, torch.zeros(2), advantages, Segments.from_lengths([2]), BAND)
    assert with_it.pop("precision/outside_frac") == 1 / 3 and without.pop("precision/outside_frac") == 0.0
    over_all = {f"precision/{name}_frac" for name in ("clipped", "clipped_lost", "phantom", "phantom_lost")}
    assert {n: v for n, v in with_it.items() if n not in over_all} == {
        n: v for n, v in without.items() if n not in over_all
    }


def test_a_token_that_left_the_learners_distribution_is_clipped_as_any_ratio_of_0():
    logp, q, b = torch.tensor([-math.inf]), torch.tensor([-1.0]), torch.tensor([-1.0])
    one = Segments.from_lengths([1])
    metrics = precision_metrics(logp, q, b, torch.tensor([-1e12]), torch.tensor([-1.0]), one, BAND)
    assert metrics["precision/phantom_frac"] == 1.0 and metrics["precision/beta_abs_max"] == 0.0


@pytest.mark.parametrize("lengths", [[], [0], [1]])
def test_no_tokens_and_one_token_give_finite_numbers_without_what_is_undefined(lengths):
    n = sum(lengths)
    x = torch.full((n,), -1.0)
    metrics = precision_metrics(x + 0.5, x, x, x * 0, torch.ones(len(lengths)), Segments.from_lengths(lengths), BAND)
    assert all(map(math.isfinite, metrics.values()))
    assert "precision/beta_advantage_corr" not in metrics
    assert ("precision/snr" in metrics) == bool(n)


def test_deployed_improvement_is_the_move_along_the_sign_of_the_advantage():
    before, after, _ = sample(seed=4)
    got = deployed_metrics(before, after, ADVANTAGES, Segments.from_lengths(LENGTHS))
    signs = [s for s, n in zip([1, 1, -1, -1, 0], LENGTHS, strict=True) for _ in range(n)]
    moved = [y - x for x, y in zip(before.double().tolist(), after.double().tolist(), strict=True)]
    improvement = math.fsum(s * d for s, d in zip(signs, moved, strict=True)) / len(moved)
    size = math.fsum(map(abs, moved)) / len(moved)
    assert got == pytest.approx(
        {
            "deployed/improvement": improvement,
            "deployed/delta_abs_mean": size,
            "deployed/outside_frac": 0.0,
            "deployed/efficiency": improvement / size,
        },
        rel=1e-12,
    )


def test_a_step_that_moves_nothing_has_no_efficiency():
    x = torch.tensor([-1.0, -2.0])
    metrics = deployed_metrics(x, x.clone(), torch.tensor([1.0]), Segments.from_lengths([2]))
    assert metrics == {"deployed/improvement": 0.0, "deployed/delta_abs_mean": 0.0, "deployed/outside_frac": 0.0}
    assert deployed_metrics(x[:0], x[:0], torch.ones(0), Segments.from_lengths([])) == metrics


def test_a_token_that_leaves_the_distribution_is_counted_and_is_in_no_mean():
    before, after = torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -math.inf])
    metrics = deployed_metrics(before, after, torch.tensor([1.0]), Segments.from_lengths([2]))
    assert metrics["deployed/improvement"] == 0.5 and metrics["deployed/outside_frac"] == 0.5
