"""Defaults that depend on the objective, and what a correction preset stands for."""

from __future__ import annotations

import pytest

from qarl.config import CorrectionConfig, ObjectiveConfig, load_config
from qarl.config.correction_presets import PRESETS
from qarl.config.objective import OBJECTIVE_DEFAULTS


@pytest.mark.parametrize(
    ("name", "advantage", "aggregation"),
    [
        ("tbpo", "grpo", "seq-mean-token-mean"),
        ("grpo", "grpo", "seq-mean-token-mean"),
        ("dapo", "grpo", "token-mean"),
        ("dual_clip_grpo", "grpo", "seq-mean-token-mean"),
        ("gspo", "grpo", "seq-mean-token-mean"),
        ("mis_gspo", "grpo", "seq-mean-token-mean"),
        ("sapo", "grpo", "seq-mean-token-mean"),
        ("positive_only", "grpo", "seq-mean-token-mean"),
        ("on_policy", "grpo", "seq-mean-token-mean"),
        ("reinforce", "reinforce", "seq-mean-token-sum"),
        ("rloo", "rloo", "seq-mean-token-sum"),
    ],
)
def test_advantage_and_aggregation_are_those_of_the_objective_unless_given(name, advantage, aggregation):
    config = ObjectiveConfig(name=name)
    assert (config.advantage, config.aggregation) == (advantage, aggregation)
    assert ObjectiveConfig(name=name, aggregation="seq-mean-token-sum-norm").aggregation == "seq-mean-token-sum-norm"
    if name != "rloo":
        assert ObjectiveConfig(name=name, advantage="grpo_no_std").advantage == "grpo_no_std"


@pytest.mark.parametrize("name", OBJECTIVE_DEFAULTS)
def test_an_objective_s_own_keys_get_its_defaults_and_others_stay_null(name):
    config = ObjectiveConfig(name=name)
    own = OBJECTIVE_DEFAULTS[name]
    every = {key for keys in OBJECTIVE_DEFAULTS.values() for key in keys}
    assert {key: getattr(config, key) for key in every} == dict.fromkeys(every) | own


def test_dapo_clips_higher_and_no_clip_reads_no_bounds():
    assert ObjectiveConfig(name="dapo").clip_ratio_high == 0.28
    config = ObjectiveConfig(name="dual_clip_grpo", loss="no_clip")
    assert (config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c) == (None, None, 3.0)


def test_the_kl_estimator_is_k3_where_there_is_a_kl():
    assert ObjectiveConfig(kl_coef=0.1).kl_estimator == "k3"
    assert ObjectiveConfig().kl_estimator is None


NONE = "no correction"
EXPANSIONS = {
    "recompute": (NONE, "train"),
    "bypass": (NONE, "rollout"),
    "tis": ("token truncate [none, 2]", "train"),
    "seq_tis": ("sequence truncate [none, 2]", "train"),
    "mis": ("sequence mask [none, 2]", "train"),
    "seq_mis": ("sequence truncate [none, 2]; reject sum ratio of corr outside [0.5, 2]", "train"),
    "token_mis": ("token mask [none, 2]", "train"),
    "icepop": ("token mask [0.5, 5]", "train"),
    "geo_rs": ("reject mean ratio of corr outside [0.999, 1.001]", "train"),
    "geo_rs_token_tis": ("token truncate [none, 2]; reject mean ratio of corr outside [0.999, 1.001]", "train"),
    "geo_rs_seq_tis": ("sequence truncate [none, 2]; reject mean ratio of corr outside [0.999, 1.001]", "train"),
    "k3_rs": ("reject mean k3 of corr outside [none, 0.01]", "train"),
    "k3_rs_token_tis": ("token truncate [none, 2]; reject mean k3 of corr outside [none, 0.01]", "train"),
    "k3_rs_seq_tis": ("sequence truncate [none, 2]; reject mean k3 of corr outside [none, 0.01]", "train"),
    "bypass_geo_rs": ("reject mean ratio of rollout outside [0.999, 1.001]", "rollout"),
    "bypass_k3_rs": ("reject mean k3 of rollout outside [none, 0.01]", "rollout"),
    "bypass_pg_is": ("sequence truncate of rollout [none, 2]", None),
    "bypass_pg_geo_rs": ("reject mean ratio of rollout outside [0.999, 1.001]", None),
    "bypass_pg_geo_rs_token_tis": (
        "token truncate of rollout [none, 2]; reject mean ratio of rollout outside [0.999, 1.001]",
        None,
    ),
    "srs-k3-corr": ("reject sum k3 of corr outside [none, 0.001]", "rollout"),
    "srs-k3-ppo": ("reject sum k3 of rollout outside [none, 0.001]", "rollout"),
    "tis-srs-k1-corr": ("token truncate [none, 2]; reject sum k1 of corr outside [none, 0.001]", "train"),
    "tis-srs-k3-corr": ("token truncate [none, 2]; reject sum k3 of corr outside [none, 0.001]", "train"),
}


def test_every_preset_has_an_expansion_here():
    assert set(EXPANSIONS) == set(PRESETS)


@pytest.mark.parametrize("preset", EXPANSIONS)
def test_a_preset_expands_and_its_yaml_loads_back_to_an_equal_config(load, tmp_path, preset):
    name = "rloo" if PRESETS[preset].policy_gradient else "grpo"
    config = load(f"objective.name={name}", f"correction.preset={preset}")
    assert (str(config.correction), config.objective.ratio) == EXPANSIONS[preset]
    copy = tmp_path / "config.yaml"
    copy.write_text(config.to_yaml())
    assert load_config(copy) == config


def test_keys_given_beside_a_preset_replace_its_own():
    config = CorrectionConfig(preset="geo_rs_token_tis", level="sequence", upper=5.0, reject=[], veto=1e-4)
    assert str(config) == "sequence truncate [none, 5]; veto below 0.0001"
    assert str(CorrectionConfig(preset="tis", level="none")) == NONE


@pytest.mark.parametrize(
    ("overrides", "ratio"),
    [
        (["objective.name=grpo"], "train"),
        (["objective={name: gspo, ratio: shadow}"], "shadow"),
        (["objective={name: sapo, ratio: rollout}", "correction.preset=bypass"], "rollout"),
        (["objective={name: grpo, ratio: one}", "correction.preset=tis"], "one"),
        (["objective.name=tbpo"], None),
        (["objective.name=rloo", "correction.preset=tis-srs-k3-corr"], None),
    ],
)
def test_the_ratio_is_the_given_one_or_the_preset_s_or_train(load, overrides, ratio):
    assert load(*overrides).objective.ratio == ratio


def test_rules_and_veto_go_with_a_ratio_that_holds_the_mismatch_and_with_tbpo(load):
    rule = "{estimator: k3, aggregate: sum, upper: 0.1}"
    assert load("objective={name: grpo, ratio: rollout}", f"correction={{reject: [{rule}], veto: 1e-4}}")
    assert load("objective.name=tbpo", f"correction={{reject: [{rule}], veto: 1e-4}}").correction.veto == 1e-4


@pytest.mark.parametrize(
    ("overrides", "min_p"),
    [
        ([], 0.0),
        (["rollout.min_p=0.05"], 0.05),
        (["objective.dvp_rho=2.26e-6"], 2.26e-6),
        (["objective.dvp_rho=0.01", "rollout.min_p=0.01"], 0.01),
    ],
)
def test_min_p_is_that_of_vocabulary_pruning_or_the_rollout_s(load, overrides, min_p):
    assert load(*overrides).min_p == min_p


@pytest.mark.parametrize(
    ("overrides", "level"),
    [
        (["objective={name: gspo, dvp_rho: 0.01}"], "response"),
        (["objective={name: rloo, dvp_rho: 0.01}"], "response"),
        (["objective={name: rloo, dvp_rho: 0.01}", "correction.preset=tis"], "token"),
        (["objective={name: rloo, dvp_rho: 0.01}", "correction.preset=mis"], "response"),
        (["objective={name: grpo, dvp_rho: 0.01}", "correction.preset=seq_tis"], "response"),
        (["objective={name: grpo, dvp_rho: 0.01}"], "token"),
        (["objective.name=grpo", "rollout.top_p=0.9"], "token"),
        (["objective={name: grpo, dvp_rho: 0.01, dvp_outside: response}"], "response"),
        (["objective={name: tbpo, dvp_outside: token}", "rollout.min_p=0.1"], "token"),
        (["objective.name=tbpo"], None),
    ],
)
def test_a_token_outside_takes_its_response_where_the_ratio_is_the_response_s(load, tmp_path, overrides, level):
    config = load(*overrides)
    assert config.objective.dvp_outside == level
    copy = tmp_path / "config.yaml"
    copy.write_text(config.to_yaml())
    assert load_config(copy) == config
