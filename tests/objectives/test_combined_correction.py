"""Importance weights, rules and veto as one weight per token, and their statistics."""

import math

import pytest
import torch
from ragged import nothing_pruned

from qarl.config import CorrectionConfig
from qarl.objectives.common import TokenLogProbs, finish_stats
from qarl.objectives.correction import correct, mean_weight, optimal_cap
from qarl.objectives.correction_config import RejectRule
from qarl.objectives.segments import Segments

SEGMENTS = Segments.from_lengths([2, 1, 0, 2])
RATIOS = [3.0, 0.5, 1.2, 1.0, 0.05]  # learner at the snapshot over sampler
NOW = [1.0, 1.0, 5.0, 1.0, 1.0]  # learner now over learner at the snapshot
TOKEN_TIS = {"level": "token", "upper": 2.0}
SEQ_TIS = {"level": "sequence", "upper": 2.0}
VETO = 0.1
# Drops the second response, whose mean is 1.2 * 5.
ROLLOUT = RejectRule(estimator="ratio", signal="rollout", aggregate="mean", upper=2.0)


def logps() -> TokenLogProbs:
    old = torch.tensor(RATIOS, dtype=torch.float64).log()
    return TokenLogProbs(old + torch.tensor(NOW).double().log(), old, torch.zeros(5, dtype=torch.float64))


def corrected(config: CorrectionConfig, x: TokenLogProbs, segments: Segments = SEGMENTS, mean: float = 1.0):
    """(weights, stats)"""
    return correct(config, x, segments, nothing_pruned(segments), mean)


def mean_of(config: CorrectionConfig, x: TokenLogProbs, segments: Segments = SEGMENTS) -> float:
    return mean_weight(config, x, segments, nothing_pruned(segments))


def run(**options) -> tuple[list[float], dict[str, float]]:
    weights, stats = corrected(CorrectionConfig(**options), logps())
    return weights.tolist(), finish_stats(stats)


def test_weights_rules_and_veto_multiply():
    weights, metrics = run(**TOKEN_TIS, reject=[ROLLOUT], veto=VETO)
    assert weights == pytest.approx([2.0, 0.5, 0.0, 0.0, 0.0])
    assert metrics["correction/veto_frac"] == 1 / 3
    assert metrics["correction/reject_rollout_ratio_mean_frac"] == 1 / 3
    assert metrics["correction/rejected_frac"] == 3 / 5  # tokens, as the weight is per token
    assert metrics["correction/raw_ratio_mean"] == pytest.approx(sum(RATIOS) / 5)
    assert metrics["correction/weight_mean"] == pytest.approx(2.5 / 5)


@pytest.mark.parametrize(
    ("options", "ratios", "bounded"),
    [
        (TOKEN_TIS, RATIOS, [2.0, 0.5, 1.2, 1.0, 0.05]),
        (SEQ_TIS | {"mode": "mask", "upper": 1.3}, [1.5, 1.2, 0.05], [0.0, 1.2, 0.05]),
    ],
)
def test_bias_and_variance_of_the_bounded_weight_ignore_rules_and_veto(options, ratios, bounded):
    _, metrics = run(**options, reject=[ROLLOUT], veto=VETO)
    mean = sum(bounded) / len(bounded)
    assert metrics["correction/bias"] == pytest.approx(mean - sum(ratios) / len(ratios))
    assert metrics["correction/variance"] == pytest.approx(sum((w - mean) ** 2 for w in bounded) / len(bounded))


@pytest.mark.parametrize(("level", "ratios"), [("token", RATIOS), ("sequence", [1.5, 1.2, 0.05])])
def test_the_automatic_cap_is_that_of_the_survey_and_is_logged(level, ratios):
    config = CorrectionConfig(level=level, cap="auto")
    cap = optimal_cap(config, logps(), SEGMENTS, nothing_pruned(SEGMENTS))
    assert cap == pytest.approx(math.sqrt(2 * sum(r * r for r in ratios) / len(ratios)))
    weights, stats = corrected(config.capped(cap), logps())
    assert finish_stats(stats)["correction/cap"] == pytest.approx(cap)
    assert weights.max() == pytest.approx(min(cap, max(ratios)))
    empty = Segments.from_lengths([0])
    none = torch.zeros(0, dtype=torch.float64)
    assert optimal_cap(config, TokenLogProbs(none, none, none), empty, nothing_pruned(empty)) is None


def test_statistics_of_sequence_weights_are_per_response_that_is_not_empty():
    weights, metrics = run(**SEQ_TIS)
    assert weights == pytest.approx([1.5, 1.5, 1.2, 0.05, 0.05])
    assert metrics["correction/weight_mean"] == pytest.approx((1.5 + 1.2 + 0.05) / 3)
    assert metrics["correction/ess"] == pytest.approx(2.75**2 / (3 * (1.5**2 + 1.2**2 + 0.05**2)))
    assert metrics["correction/raw_ratio_mean"] == pytest.approx(2.75 / 3)


def test_the_mean_of_weights_that_are_all_zero_or_absent_divides_by_one():
    mask = CorrectionConfig(level="token", mode="mask", lower=1e3, upper=1e4)
    assert mean_of(mask, logps()) == 1.0
    nothing = TokenLogProbs(*[torch.zeros(0)] * 3)
    assert mean_of(CorrectionConfig(**TOKEN_TIS), nothing, Segments.from_lengths([0])) == 1.0
    assert mean_of(CorrectionConfig(), logps()) == 1.0


# drops tokens of ratio 3.0, 0.5 and 0.05
TOKENS = RejectRule(estimator="ratio", aggregate="token", lower=0.6, upper=2.5)


def test_a_mask_of_tokens_stands_beside_a_weight_of_the_response():
    weights, metrics = run(**SEQ_TIS, reject=[TOKENS])
    assert weights == pytest.approx([0.0, 0.0, 1.2, 0.05, 0.0])
    assert metrics["correction/reject_corr_ratio_token_frac"] == metrics["correction/rejected_frac"] == 3 / 5
    assert metrics["correction/weight_mean"] == pytest.approx(1.25 / 5)
    assert metrics["correction/raw_ratio_mean"] == pytest.approx(2.75 / 3)  # of the weights as they are made


def test_an_uncapped_weight_of_a_long_response_is_the_product_and_its_clamp_is_counted():
    lengths = [100, 400]
    x = TokenLogProbs(*[torch.full((500,), v, dtype=torch.float64) for v in (-1.0, -1.0, -1.1)])
    weights, stats = corrected(CorrectionConfig(level="sequence", mode="raw"), x, Segments.from_lengths(lengths))
    assert weights[0].item() == pytest.approx(math.exp(10.0), rel=1e-9)  # no cap
    assert weights[-1].item() == pytest.approx(math.exp(20.0), rel=1e-9)  # of exp(40)
    assert finish_stats(stats)["correction/clamped_frac"] == 0.5


def test_a_mask_keeps_a_ratio_on_its_bound_and_a_nan():
    ratio = torch.tensor(2.0, dtype=torch.float64).log().exp().item()
    for bounds in ({"lower": ratio, "upper": 3.0}, {"upper": ratio}):
        config = CorrectionConfig(level="token", mode="mask", **bounds)
        x = torch.tensor([math.log(2.0), math.nan], dtype=torch.float64)
        segments = Segments.from_lengths([2])
        weights = corrected(config, TokenLogProbs(x, x, torch.zeros_like(x)), segments)[0]
        assert weights[0] == ratio and weights[1].isnan()
