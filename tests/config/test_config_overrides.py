"""`key.path=value` on the command line."""

import os

import pytest

from qarl.config import load_config
from qarl.config.overrides import apply_overrides, override_keys
from qarl.errors import UserError


def test_values_are_yaml_and_paths_reach_lists_mappings_and_null_sections(load):
    config = load("optim.lr=3e-5", "data.shuffle=false", "rollout.stop=[a, b]", "data.columns={prompt: question}")
    assert (config.optim.lr, config.data.shuffle, config.rollout.stop) == (3e-5, False, ["a", "b"])
    assert config.data.columns == {"prompt": "question"}
    assert load("reward.functions.0.weight=2").reward.functions[0].weight == 2.0
    config = load("data.task.size=10", "reward.functions.0.options.pattern=a=b")
    assert config.data.task == {"size": 10}
    assert config.reward.functions[0].options == {"pattern": "a=b"}
    assert load("logging.wandb.project=p").logging.wandb.project == "p"
    assert load("rollout.kv_cache_tokens=").rollout.kv_cache_tokens is None
    assert load("train.steps=5", "train.steps=6").train.steps == 6


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "train.steps: an override is key.path=value"),
        ("train.steps=[", "train.steps=[: "),
        ("train.steps.x=3", "train.steps.x=3: train.steps = 3 has no keys below it; override train.steps itself"),
        ("reward.functions.0.options.prompts=2", "is an argument of every reward function; rename the option"),
        ("reward.functions.1.weight=2", "reward.functions.1.weight=2: reward.functions is a list"),
        ("quant.ignore.0=x", "quant.ignore.0=x: the file gives no list quant.ignore; give the whole list"),
        ("reward.functions.0000.weight=2", "valid indices are 0 to 0"),
        ("reward.functions.².weight=2", "valid indices are 0 to 0"),
        ("reward.functions.\u0660.weight=2", "valid indices are 0 to 0"),
        (f"reward.functions.{'9' * 5000}.weight=2", "valid indices are 0 to 0"),
        (".".join("k" * 10_000) + "=1", "its path has 10,000 keys"),
        ("train.steps=" + "9" * 100_000, "line 1, column 1: the integer 99999999999999999999... of 100,000 characters"),
        ("data.source=" + "x" * 100_000, "must have at most 4095 characters"),
        (os.fsdecode(b"data.source=\xff"), "the character U+DCFF"),
        ("data\n.source=x", "its path contains characters that no key has"),
        ("optim={lr: 1, lr: 2}", "lr: line 1: the key is already in line 1"),
    ],
    ids=range(16),
)
def test_an_override_that_cannot_be_applied_is_refused_on_one_line(load, override, message):
    with pytest.raises(UserError) as caught:
        load(override)
    line = str(caught.value)
    assert line.startswith("command line: ") and message in line, line
    assert "\n" not in line and len(line) < 500


def test_an_override_of_one_use_of_an_alias_leaves_the_others(minimal):
    minimal.write_text(minimal.read_text().replace("{name: exact}", "&e {name: exact}, *e"))
    config = load_config(minimal, ["reward.functions.1.weight=3"])
    assert [function.weight for function in config.reward.functions] == [1.0, 3.0]


def test_faults_of_overrides_are_all_reported_and_name_the_command_line(load):
    with pytest.raises(UserError, match=r"^command line: data.columns.5 = 3"):
        load("data.columns={a: b}", "data.columns.5=3")
    assert override_keys(["a.0.b=1"]) == {("a", "0", "b")}
    with pytest.raises(UserError) as caught:
        apply_overrides({"a": 1}, ["a.b=1", "=", "c=["])
    assert len(str(caught.value).splitlines()) == 3
