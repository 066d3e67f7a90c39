"""The reading: healthy numbers say so, each failure mode is named, and nothing is judged that was not measured."""

import math

import pytest

from qarl.diagnose.reading import read

HEALTHY = {
    "mismatch/delta_abs_mean": 1e-4,
    "mismatch/delta_abs_max": 0.01,
    "mismatch/chi2_token": 1e-6,
    "mismatch/ess_frac": 0.9999,
    "mismatch/tail_abs_mean": 2e-3,
    "mismatch/head_abs_mean": 1e-4,
    "history/k3_first": 1e-6,
    "history/k3_last": 1e-6,
    "policy/contribution_train_pos": -0.02,
    "policy/contribution_train_neg": -0.02,
    "policy/contribution_rollout_pos": -0.0201,
    "policy/contribution_rollout_neg": -0.0201,
    "precision/alpha_abs_mean": 0.05,
    "precision/beta_abs_mean": 1e-3,
    "precision/beta_abs_max": 0.02,
    "precision/snr": 50.0,
    "precision/clipped_frac": 0.01,
    "precision/phantom_frac": 0.0,
    "gradients/cos_total": 0.999,
    "gradients/ratio_rel": 0.01,
    "gradients/score_rel": 0.01,
    "deployed/improvement": 1e-3,
    "deployed/delta_abs_mean": 0.0125,
    "deployed/efficiency": 0.08,
    "error_tokens/frac": 0.0,
    "error_tokens/positive_frac": 0.0,
    "error_tokens/negative_frac": 0.0,
    "weights/ess_frac": 0.99,
    "weights/zero_frac": 0.0,
}


def said(level: str, **changes: float | None) -> str:
    """The findings of a level, one after the other, after these changes to healthy numbers (`__` stands for `/`)."""
    metrics = HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()}
    return "\n".join(finding.text for finding in read(metrics) if finding.level == level)


def test_a_healthy_run_is_called_healthy_first():
    findings = read(HEALTHY)
    assert {finding.level for finding in findings} == {"fine"}
    assert read(HEALTHY | {"gradients/cos_total": 0.5, "precision/snr": 0.4})[0].level == "problem"
    assert findings[0].text == "Nothing measured here points to a known failure mode."


def test_bit_for_bit_is_said():
    exact = said("fine", mismatch__delta_abs_max=0.0, precision__beta_abs_max=0.0)
    assert "bit for bit" in exact and "beta is 0 at every token" in exact


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"mismatch__chi2_token": 2.0, "mismatch__ess_frac": 0.3}, "problem", "different policies"),
        ({"mismatch__delta_abs_max": 0.95}, "watch", "maxima near 1.0"),
        ({"mismatch__chi2_token": 0.04}, "watch", "differ at many tokens"),
        ({"mismatch__tail_abs_mean": 0.4}, "watch", "objective.dvp_rho"),
        ({"history__k3_last": 0.01}, "watch", "K3 between learner and sampler grew"),
        ({"policy__contribution_train_pos": 0.02}, "watch", "two signs unevenly"),
        (
            {"precision__phantom_frac": 0.135},
            "problem",
            "13.5% of the tokens are outside the clip bounds because of precision",
        ),
        ({"precision__snr": 0.42}, "watch", "mostly precision"),
        ({"precision__clipped_frac": 0.4}, "watch", "lower optim.lr"),
        ({"mismatch__outside_frac": 0.05}, "watch", "5.0% of the tokens are outside"),
        ({"gradients__cos_total": 0.55, "gradients__score_rel": 1.0}, "problem", "through the score"),
        ({"gradients__cos_total": 0.9, "gradients__ratio_rel": 0.4}, "watch", "through the ratio"),
        (
            {"gradients__cos_clipped": 0.55, "gradients__clip_rel": 0.7, "gradients__clipped_rel": 0.9},
            "problem",
            "Phantom clipping changes the direction of the gradient",
        ),
        ({"deployed__efficiency": -0.02}, "watch", "hardly improved the served policy: -2.0%"),
        ({"deployed__delta_abs_mean": 0.0, "deployed__efficiency": None}, "watch", "did not change the served policy"),
        ({"error_tokens__frac": 0.04, "error_tokens__negative_frac": 0.07}, "problem", "objective.name: tbpo"),
        (
            {"error_tokens__frac": 0.04, "error_tokens__negative_frac": 0.04, "error_tokens__positive_frac": 0.04},
            "watch",
            "not QaRL's pattern",
        ),
        ({"weights__zero_frac": 0.8}, "watch", "drops 80.0%"),
        ({"weights__ess_frac": 0.2}, "watch", "far from 1"),
    ],
)
def test_each_failure_mode_is_named_with_its_level(changes, level, words):
    assert words in said(level, **changes)
    assert words not in said("fine", **changes)


def test_tokens_outside_a_distribution_do_not_make_the_others_look_bad():
    # As DVP has it: an infinite difference is on record as 20 nats.
    pruned = {
        "mismatch__delta_abs_max": 20.0,
        "mismatch__delta_abs_mean": 0.1,
        "mismatch__outside_frac": 0.005,
        "mismatch__inside_abs_max": 0.02,
        "mismatch__inside_abs_mean": 1e-3,
    }
    assert said("watch", **pruned) == ""
    assert "differ little: mean |delta| is 0.001 nats, the maximum 0.02" in said("fine", **pruned)


def test_where_the_correction_drops_every_token_a_larger_rate_is_no_advice():
    still = {"deployed__delta_abs_mean": 0.0, "deployed__efficiency": None}
    assert "raise optim.lr" in said("watch", **still)
    rejected = said("watch", **still, weights__zero_frac=1.0)
    assert "left no token to learn from" in rejected and "raise optim.lr" not in rejected


@pytest.mark.parametrize("missing", [None, math.nan])
def test_what_was_not_measured_is_not_judged(missing):
    assert read({}) == []
    assert read(dict.fromkeys(HEALTHY, missing)) == []
