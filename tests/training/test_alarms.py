"""Warnings of a run, once per cause: fractions that stay above one half, and clamped exponents."""

import pytest
from plain_settings import plain_config

from qarl.config import Config
from qarl.objectives.objective import build_objective
from qarl.training.alarms import Alarms, idle_correction

K3 = "correction/reject_corr_k3_sum_frac"
REJECTED = "correction/rejected_frac"


def config_of(**sections) -> Config:
    return plain_config(**{"objective": {"name": "grpo"}, **sections})


def alarms(**sections) -> tuple[Alarms, list[str]]:
    config = config_of(**sections)
    said: list[str] = []
    return Alarms(config, build_objective(config.objective, config.correction), said.append), said


SRS = {"correction": {"preset": "srs-k3-corr"}}


def test_a_rule_that_rejects_nearly_everything_is_named_once_with_its_threshold_and_its_share():
    watch, said = alarms(**SRS)
    for step in range(1, 31):
        watch.step(step, {K3: 0.9997, REJECTED: 0.9997})
    assert said == [
        "step 10: the rule 'sum k3 of corr outside [none, 0.001]' rejects responses: 99.97% in this step, and more "
        "than half in each of the last 10 steps; little training signal remains"
    ]


def test_a_step_without_the_share_begins_the_ten_steps_again():
    watch, said = alarms(**SRS)
    for step, share in enumerate([1.0] * 9 + [0.5] + [0.500001] * 20, 1):
        watch.step(step, {K3: share, REJECTED: share})
    assert [line.split(":")[0] for line in said] == ["step 20"]


@pytest.mark.parametrize(
    ("sections", "metrics", "words"),
    [
        ({"correction": {"veto": 1e-4}}, {"correction/veto_frac": 0.6, REJECTED: 0.6}, "veto (a token below 0.0001)"),
        (
            {"correction": {"reject": [{"estimator": "ratio", "aggregate": "token", "upper": 1.1}]}},
            {"correction/reject_corr_ratio_token_frac": 0.7, REJECTED: 0.7},
            "outside [none, 1.1]' rejects tokens",
        ),
        (
            {"correction": {"veto": 0.1, "reject": [{"estimator": "k1", "aggregate": "sum", "upper": 1.0}]}},
            {"correction/veto_frac": 0.4, "correction/reject_corr_k1_sum_frac": 0.4, REJECTED: 0.7},
            "the correction (reject sum k1 of corr outside [none, 1]; veto below 0.1) rejects responses: 70.00%",
        ),
    ],
)
def test_everything_that_rejects_is_watched(sections, metrics, words):
    watch, said = alarms(**sections)
    for step in range(1, 25):
        watch.step(step, metrics)
    assert len(said) == 1 and words in said[0]


OUTSIDE, RESPONSES = "policy/outside_frac_max", "policy/outside_responses_frac_max"


@pytest.mark.parametrize(
    ("sections", "level", "fix"),
    [
        (
            {"objective": {"name": "gspo", "dvp_outside": "response"}, "rollout": {"top_p": 0.9}},
            "response",
            "raise rollout.top_p (0.9)",
        ),
        ({"objective": {"name": "grpo", "dvp_rho": 0.1}}, "token", "lower objective.dvp_rho (0.1)"),
        (
            {"objective": {"name": "tbpo"}, "rollout": {"top_k": 20, "min_p": 0.01}},
            "token",
            "set objective.truncation_set: replay or raise rollout.top_k (20) or lower rollout.min_p (0.01), lower",
        ),
    ],
)
def test_the_first_minibatch_above_the_limit_is_reported_once_with_the_fix(sections, level, fix):
    watch, said = alarms(**sections)
    name, limit, other = (RESPONSES, 0.1, OUTSIDE) if level == "response" else (OUTSIDE, 0.01, RESPONSES)
    for step, share in enumerate([0.0, limit, 1.1 * limit, 0.9, 0.0, 0.9], 1):
        watch.step(step, {name: share, other: 0.0})
    assert len(said) == 1 and said[0].startswith(f"step 3: in one minibatch {1.1 * limit:.2%} of the {level}")
    assert fix in said[0] and ("objective.dvp_outside: token" in said[0]) == (level == "response")


def test_a_clamped_exponent_of_a_weight_is_said_at_once_and_once():
    watch, said = alarms(correction={"level": "sequence", "mode": "raw"})
    for step in (1, 2, 3):
        watch.step(step, {"correction/clamped_frac": 0.25 if step > 1 else 0.0, REJECTED: 0.0})
    assert len(said) == 1 and said[0].startswith("step 2: 25.00% of the importance weights had an exponent outside")


@pytest.mark.parametrize(
    ("sections", "changed", "words"),
    [
        (
            {"correction": {"preset": "tis"}},
            {},
            "(token truncate [none, 2]) changed nothing in 3 steps: every weight was",
        ),
        ({"objective": {"name": "mis_gspo"}}, {}, "(sequence mask [none, 2]) changed nothing in 3 steps"),
        (
            {"objective": {"name": "mis_gspo"}},
            {"correction/ess": 0.99},
            "(sequence mask [none, 2]) rejected nothing in",
        ),
        (SRS, {}, "changed nothing in 3 steps"),
        (SRS, {REJECTED: 0.01}, None),
        ({"correction": {"preset": "tis"}}, {"correction/weight_mean": 0.999}, None),
        ({"objective": {"name": "tbpo"}}, {}, None),  # its own weight, which rejects nothing
        ({}, {}, None),
    ],
)
def test_at_the_end_of_a_run_a_correction_that_did_nothing_is_named(sections, changed, words):
    config = config_of(**sections)
    objective = build_objective(config.objective, config.correction)
    quiet = {REJECTED: 0.0, "correction/weight_mean": 1.0, "correction/ess": 1.0}
    found = idle_correction(config, objective, [quiet, quiet | changed, quiet])
    assert found is None if words is None else words in found
    assert idle_correction(config, objective, []) is None
