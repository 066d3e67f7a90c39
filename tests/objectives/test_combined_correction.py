"""Weights, rules and veto as one weight a token, and their statistics."""

from __future__ import annotations

import math

import pytest
import torch

from qarl.objectives.correction.combined import Correction
from qarl.objectives.correction.rejection import Rejection
from qarl.objectives.correction.weights import Weighting
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import add_stats, finish_stats
from qarl.objectives.tokens import TokenLogProbs

SEGMENTS = Segments.from_lengths([2, 1, 0, 2])
RATIOS = [3.0, 0.5, 1.2, 1.0, 0.05]  # learner at the snapshot over sampler
NOW = [1.0, 1.0, 5.0, 1.0, 1.0]  # learner now over learner at the snapshot
TOKEN_TIS = Weighting("token", "truncate", None, 2.0)
SEQ_TIS = Weighting("sequence", "truncate", None, 2.0)
VETO = 0.1
CORR = Rejection("ratio", "corr", "mean", 0.1, 1.21)  # geometric means sqrt(1.5), 1.2, -, sqrt(0.05)
ROLLOUT = Rejection("ratio", "rollout", "mean", None, 2.0)  # drops the second response: 1.2 * 5


def logps() -> TokenLogProbs:
    old = torch.tensor(RATIOS, dtype=torch.float64).log()
    return TokenLogProbs(old + torch.tensor(NOW).double().log(), old, torch.zeros(5, dtype=torch.float64))


def run(**options) -> tuple[list[float], dict[str, float]]:
    combined = Correction(**options)(logps(), SEGMENTS)
    return combined.weights.tolist(), finish_stats(combined.stats)


def test_weights_rules_and_veto_multiply():
    weights, metrics = run(weighting=TOKEN_TIS, rejections=(ROLLOUT,), veto=VETO)
    assert weights == pytest.approx([2.0, 0.5, 0.0, 0.0, 0.0])
    assert metrics["correction/veto_frac"] == 1 / 3
    assert metrics["correction/reject_rollout_ratio_mean_frac"] == 1 / 3
    assert metrics["correction/rejected_frac"] == 3 / 5  # tokens, as the weight is per token
    assert metrics["correction/raw_ratio_mean"] == pytest.approx(sum(RATIOS) / 5)
    assert metrics["correction/weight_mean"] == pytest.approx(2.5 / 5)


def test_a_response_has_to_pass_every_rule_and_each_is_counted_alone():
    weights, metrics = run(rejections=(CORR, ROLLOUT))
    assert weights == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert metrics["correction/reject_corr_ratio_mean_frac"] == 1 / 3
    assert metrics["correction/reject_rollout_ratio_mean_frac"] == 1 / 3
    assert metrics["correction/rejected_frac"] == 2 / 3  # of the responses that are not empty
    assert "correction/raw_ratio_mean" not in metrics


def test_statistics_of_sequence_weights_are_per_response_that_is_not_empty():
    weights, metrics = run(weighting=SEQ_TIS)
    assert weights == pytest.approx([1.5, 1.5, 1.2, 0.05, 0.05])
    assert metrics["correction/weight_mean"] == pytest.approx((1.5 + 1.2 + 0.05) / 3)
    assert metrics["correction/ess"] == pytest.approx(2.75**2 / (3 * (1.5**2 + 1.2**2 + 0.05**2)))
    assert metrics["correction/raw_ratio_mean"] == pytest.approx(2.75 / 3)


def test_the_mean_for_normalization_leaves_rules_and_veto_out():
    correction = Correction(TOKEN_TIS, (CORR, ROLLOUT), VETO, normalize=True)
    mean = correction.weight_mean(logps(), SEGMENTS)
    assert mean == pytest.approx((2.0 + 0.5 + 1.2 + 1.0 + 0.05) / 5)
    assert Correction(SEQ_TIS).weight_mean(logps(), SEGMENTS) == pytest.approx(2.75 / 3)
    combined = Correction(TOKEN_TIS)(logps(), SEGMENTS, mean)
    assert combined.weights.mean().item() == pytest.approx(1.0)


def test_the_mean_of_weights_that_are_all_zero_or_absent_divides_by_one():
    mask = Weighting("token", "mask", 1e3, 1e4)
    assert Correction(mask).weight_mean(logps(), SEGMENTS) == 1.0
    nothing = TokenLogProbs(*[torch.zeros(0)] * 3)
    assert Correction(TOKEN_TIS).weight_mean(nothing, Segments.from_lengths([0])) == 1.0
    assert Correction().weight_mean(logps(), SEGMENTS) == 1.0


def test_statistics_of_two_parts_add_up_to_the_whole():
    correction = Correction(TOKEN_TIS, (CORR, ROLLOUT), VETO)
    whole, x = finish_stats(correction(logps(), SEGMENTS).stats), logps()
    parts = {}
    for first, last, lengths in [(0, 2, [2]), (2, 5, [1, 0, 2])]:
        cut = TokenLogProbs(x.logp[first:last], x.logp_old[first:last], x.logp_sampler[first:last])
        parts = add_stats(parts, correction(cut, Segments.from_lengths(lengths)).stats)
    assert finish_stats(parts) == pytest.approx(whole, rel=1e-14)


def test_no_gradient_reaches_the_log_probs():
    x = logps()
    x = TokenLogProbs(x.logp.requires_grad_(), x.logp_old.requires_grad_(), x.logp_sampler)
    assert not Correction(TOKEN_TIS, (ROLLOUT,), VETO)(x, SEGMENTS).weights.requires_grad


@pytest.mark.parametrize("weighting", [TOKEN_TIS, SEQ_TIS, None])
@pytest.mark.parametrize(("old", "sampler"), [(-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf)])
def test_infinite_log_probs_give_finite_weights(weighting, old, sampler):
    x = TokenLogProbs(torch.tensor([old, -1.0]), torch.tensor([old, -1.0]), torch.tensor([sampler, -1.0]))
    combined = Correction(weighting, (CORR, ROLLOUT), VETO)(x, Segments.from_lengths([2]))
    assert combined.weights.isfinite().all()
    assert all(math.isfinite(value) for value in finish_stats(combined.stats).values())


def test_a_correction_without_parts_is_empty():
    assert Correction().empty
    assert not any(c.empty for c in (Correction(TOKEN_TIS), Correction(rejections=(CORR,)), Correction(veto=VETO)))


TOKENS = Rejection("ratio", "corr", "token", 0.6, 2.5)  # drops tokens of ratio 3.0, 0.5 and 0.05


def test_a_mask_of_tokens_stands_beside_a_weight_of_the_response():
    weights, metrics = run(weighting=SEQ_TIS, rejections=(TOKENS,))
    assert weights == pytest.approx([0.0, 0.0, 1.2, 0.05, 0.0])
    assert metrics["correction/reject_corr_ratio_token_frac"] == metrics["correction/rejected_frac"] == 3 / 5
    assert metrics["correction/weight_mean"] == pytest.approx(1.25 / 5)
    assert metrics["correction/raw_ratio_mean"] == pytest.approx(2.75 / 3)  # of the weights as they are made


def test_a_mask_of_tokens_stands_beside_a_weight_of_the_tokens_and_a_rule_of_responses():
    weights, metrics = run(weighting=TOKEN_TIS, rejections=(TOKENS, ROLLOUT))
    assert weights == pytest.approx([0.0, 0.0, 0.0, 1.0, 0.0])
    assert metrics["correction/reject_rollout_ratio_mean_frac"] == 1 / 3
    assert metrics["correction/rejected_frac"] == 4 / 5


def test_an_uncapped_weight_of_a_long_response_is_the_product_and_its_clamp_is_counted():
    lengths = [100, 400]
    x = TokenLogProbs(*[torch.full((500,), v, dtype=torch.float64) for v in (-1.0, -1.0, -1.1)])
    combined = Correction(Weighting("sequence", "raw"))(x, Segments.from_lengths(lengths))
    assert combined.weights[0].item() == pytest.approx(math.exp(10.0), rel=1e-9)  # no cap
    assert combined.weights[-1].item() == pytest.approx(math.exp(20.0), rel=1e-9)  # of exp(40)
    assert finish_stats(combined.stats)["correction/clamped_frac"] == 0.5
