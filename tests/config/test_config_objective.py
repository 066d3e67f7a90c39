"""Defaults that depend on the objective, and the expansion of correction presets."""

import pytest
from objective_sections import objective_config

from qarl.config import CorrectionConfig, ObjectiveConfig
from qarl.errors import UserError
from qarl.objectives.correction_config import PRESETS
from qarl.objectives.registry import BY_NAME

SHARED = {  # advantage and aggregation of those that differ from grpo and seq-mean-token-mean
    "dapo": ("grpo", "token-mean"),
    "m2po": ("grpo", "token-mean"),
    "reinforce": ("reinforce", "seq-mean-token-sum"),
    "rloo": ("rloo", "seq-mean-token-sum"),
    "sft": ("reinforce", "token-mean"),
    "distill": ("reinforce", "token-mean"),
}


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"custom"}))
def test_advantage_and_aggregation_are_those_of_the_objective_unless_given(name):
    config = objective_config(name=name)
    assert (config.advantage, config.aggregation) == SHARED.get(name, ("grpo", "seq-mean-token-mean"))
    assert objective_config(name=name, aggregation="seq-mean-token-sum-norm").aggregation == "seq-mean-token-sum-norm"
    if name != "rloo":
        assert objective_config(name=name, advantage="grpo_no_std").advantage == "grpo_no_std"


RATIO = {"ratio": None, "router_shift_floor": None}
PPO = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "loss": "clip", **RATIO}
GSPO = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, **RATIO}
GMPO = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4, **RATIO}
SEQ_CLIP = {"seq_clip_ratio_high": 4e-4, "seq_clip_ratio_low": 3e-4, "seq_tis_imp_ratio_cap": 2.0}
OWN_KEYS = {  # TBPO: QaRL appendix, GSPO, SAPO and DAPO: their papers, the rest: PPO's 0.2 and dual clip's 3
    "tbpo": SEQ_CLIP | {"neg_seq_clip_ratio_high": 7e-4, "neg_seq_clip_ratio_low": 3e-4},
    "grpo": PPO,
    "dapo": PPO | {"clip_ratio_high": 0.28},
    "dual_clip_grpo": PPO | {"clip_ratio_c": 3.0},
    "gspo": GSPO,
    "mis_gspo": GSPO | {"mis_ratio_low": 0.0, "mis_ratio_high": 2.0},
    "gmpo": GMPO,
    "rspo": GMPO | {"router_shift_floor": 0.8},
    "sapo": {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05, **RATIO},
    "m2po": {"m2_threshold": 0.04, **RATIO},
    "positive_only": PPO,
    **{name: {} for name in ("on_policy", "reinforce", "rloo", "sft", "distill")},
}


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"custom"}))
def test_an_objective_has_its_own_keys_with_their_defaults_and_no_others(name):
    given = objective_config(name=name).model_dump()
    shared = set(ObjectiveConfig.model_fields)
    assert {key: value for key, value in given.items() if key not in shared} == OWN_KEYS[name]


def test_another_name_on_the_command_line_brings_its_own_defaults(load):
    assert load("objective.name=dapo").objective == load("objective={name: dapo}").objective
    changed = load("objective={name: grpo, kl_coef: 0.5}", "objective.name=gspo").objective
    assert (changed.name, changed.kl_coef, changed.clip_ratio_high) == ("gspo", 0.5, 4e-4)
    with pytest.raises(UserError, match=r"objective\.clip_ratio_c = 3\.0: is read by dual_clip_grpo, not by gspo"):
        load("objective={name: dual_clip_grpo, clip_ratio_c: 3.0}", "objective.name=gspo")


def test_a_users_objective_is_a_path_in_one_word_or_a_section(load, reloaded):
    short = load("objective=mine/own.py:f")
    assert short == load("objective={name: custom, path: 'mine/own.py:f'}")
    assert (short.objective.file, short.objective.kwargs, short.objective.ratio) == ("mine/own.py", {}, "train")
    assert load("objective={name: custom, path: 'pkg.own:f', kwargs: {a: [1]}}").objective.file is None
    assert reloaded(short) == short


NONE = "no correction"
GEO = "reject mean ratio of corr outside [0.999, 1.001]"
EXPANSIONS = {
    "recompute": (NONE, "train"),
    "bypass": (NONE, "rollout"),
    "tis": ("token truncate [none, 2]", "train"),
    "seq_tis": ("sequence truncate [none, 2]", "train"),
    "mis": ("sequence mask [none, 2]", "train"),
    "seq_mis": ("sequence truncate [none, 2]; reject sum ratio of corr outside [0.5, 2]", "train"),
    "token_mis": ("token mask [none, 2]", "train"),
    "icepop": ("token mask [0.5, 5]", "train"),
    "geo_rs": (GEO, "train"),
    "geo_rs_token_tis": (f"token truncate [none, 2]; {GEO}", "train"),
    "geo_rs_seq_tis": (f"sequence truncate [none, 2]; {GEO}", "train"),
    "k3_rs": ("reject mean k3 of corr outside [none, 0.01]", "train"),
    "k3_rs_token_tis": ("token truncate [none, 2]; reject mean k3 of corr outside [none, 0.01]", "train"),
    "k3_rs_seq_tis": ("sequence truncate [none, 2]; reject mean k3 of corr outside [none, 0.01]", "train"),
    "bypass_geo_rs": ("reject mean ratio of rollout outside [0.999, 1.001]", "rollout"),
    "bypass_k3_rs": ("reject mean k3 of rollout outside [none, 0.01]", "rollout"),
    "bypass_pg_is": ("sequence truncate of rollout [none, 2]", None),
    "bypass_pg_geo_rs": ("reject mean ratio of rollout outside [0.999, 1.001]", None),
    "bypass_pg_geo_rs_token_tis": (f"token truncate of rollout [none, 2]; {GEO.replace('corr', 'rollout')}", None),
    "srs-k3-corr": ("reject sum k3 of corr outside [none, 0.001]", "rollout"),
    "srs-k3-ppo": ("reject sum k3 of rollout outside [none, 0.001]", "rollout"),
    "tis-srs-k1-corr": ("token truncate [none, 2]; reject sum k1 of corr outside [none, 0.001]", "train"),
    "tis-srs-k3-corr": ("token truncate [none, 2]; reject sum k3 of corr outside [none, 0.001]", "train"),
}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_expands_and_its_yaml_loads_back_to_an_equal_config(load, reloaded, preset):
    name = "rloo" if PRESETS[preset].policy_gradient else "grpo"
    config = load(f"objective.name={name}", f"correction.preset={preset}")
    assert (str(config.correction), getattr(config.objective, "ratio", None)) == EXPANSIONS[preset]
    assert reloaded(config) == config


def test_an_automatic_cap_or_other_keys_replace_those_of_a_preset(load, reloaded):
    config = load("objective.name=grpo", "correction={preset: icepop, cap: auto}")
    assert str(config.correction) == "token mask [none, auto]"
    assert (config.correction.lower, config.correction.upper) == (None, None)
    assert reloaded(config) == config
    config = CorrectionConfig(preset="geo_rs_token_tis", level="sequence", upper=5.0, reject=[], veto=1e-4)
    assert str(config) == "sequence truncate [none, 5]; veto below 0.0001"
    assert str(CorrectionConfig(preset="tis", level="none")) == NONE


def test_presets_of_vexact_sum_the_loss_over_tokens_unless_the_aggregation_is_given(load):
    vexact = [name for name in PRESETS if "srs-" in name]
    found = {load("objective.name=dapo", f"correction.preset={name}").objective.aggregation for name in vexact}
    assert len(vexact) == 4 and found == {"seq-mean-token-sum"}
    given = load("objective={name: grpo, aggregation: token-mean}", "correction.preset=srs-k3-corr")
    assert given.objective.aggregation == "token-mean"
    assert load("objective.name=dapo", "correction.preset=tis").objective.aggregation == "token-mean"


@pytest.mark.parametrize(
    ("overrides", "key", "kind"),
    [
        (["objective.name=grpo"], "train", "train"),
        (["objective={name: gspo, ratio: shadow}"], "shadow", "shadow"),
        (["objective={name: sapo, ratio: rollout}", "correction.preset=bypass"], "rollout", "rollout"),
        (["objective={name: grpo, ratio: one}", "correction.preset=tis"], "one", "one"),
        # objectives with a single ratio have no such key
        (["objective.name=tbpo"], None, "train"),
        (["objective.name=on_policy"], None, "one"),
    ],
)
def test_the_ratio_is_the_given_one_or_that_of_the_preset_or_train(load, overrides, key, kind):
    objective = load(*overrides).objective
    assert (getattr(objective, "ratio", None), objective.ratio_kind) == (key, kind)


@pytest.mark.parametrize(
    ("overrides", "min_p"),
    [([], 0.0), (["objective.dvp_rho=2.26e-6"], 2.26e-6), (["objective.dvp_rho=0.01", "rollout.min_p=0.01"], 0.01)],
)
def test_min_p_is_that_of_vocabulary_pruning_or_the_rollout_s(load, overrides, min_p):
    assert load(*overrides).min_p == min_p


@pytest.mark.parametrize(
    ("overrides", "level"),
    [
        (["objective={name: gspo, dvp_rho: 0.01}"], "response"),
        (["objective={name: rloo, dvp_rho: 0.01}"], "response"),
        (["objective={name: rloo, dvp_rho: 0.01}", "correction.preset=tis"], "token"),
        (["objective={name: grpo, dvp_rho: 0.01}", "correction.preset=seq_tis"], "response"),
        (["objective={name: grpo, dvp_rho: 0.01}"], "token"),
        (["objective={name: tbpo, dvp_rho: 0.01}"], "response"),
        # top-p, top-k and plain min-p are no DVP, alone or beside it
        (["objective.name=tbpo", "rollout.top_p=0.9"], "token"),
        (["objective={name: reinforce, dvp_rho: 0.01}", "rollout.top_k=20"], "token"),
        (["objective={name: gspo, dvp_outside: response}", "rollout.top_p=0.9"], "response"),
        (["objective={name: tbpo, dvp_outside: token}", "rollout.min_p=0.1"], "token"),
        (["objective.name=tbpo"], None),
    ],
)
def test_a_token_outside_drops_its_response_only_with_dvp_and_one_ratio_per_response(load, reloaded, overrides, level):
    config = load(*overrides)
    assert config.objective.dvp_outside == level and reloaded(config) == config
