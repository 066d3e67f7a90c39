"""`key.path=value` on the command line."""

from __future__ import annotations

import pytest

from qarl.errors import UserError


def test_a_value_is_read_as_yaml(load):
    config = load("optim.lr=3e-5", "data.shuffle=false", "rollout.stop=[a, b]", "data.columns={prompt: question}")
    assert config.optim.lr == 3e-5
    assert config.data.shuffle is False
    assert config.rollout.stop == ["a", "b"]
    assert config.data.columns == {"prompt": "question"}


def test_a_number_indexes_a_list_of_the_file(load):
    assert load("reward.functions.0.weight=2").reward.functions[0].weight == 2.0


def test_keys_below_a_free_mapping_are_free(load):
    config = load("data.task.size=10", "reward.functions.0.options.pattern=a=b")
    assert config.data.task == {"size": 10}
    assert config.reward.functions[0].options == {"pattern": "a=b"}


def test_a_null_section_is_created(load):
    assert load("logging.wandb.project=p").logging.wandb.project == "p"


def test_nothing_after_the_equals_sign_is_null(load):
    assert load("rollout.kv_cache_tokens=").rollout.kv_cache_tokens is None


def test_the_last_of_two_overrides_wins(load):
    assert load("train.steps=5", "train.steps=6").train.steps == 6


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "an override is key.path=value"),
        ("=3", "an override is key.path=value"),
        ("train..steps=3", "an override is key.path=value"),
        ("train.steps=[", "not valid YAML"),
        ("train.steps.x=3", "train.steps = 3 has no keys below it; override train.steps itself"),
        ("reward.functions.1.weight=2", "reward.functions is a list; valid indices are 0 to 0"),
        ("reward.functions.first.weight=2", "reward.functions is a list; valid indices are 0 to 0"),
        ("quant.ignore.0=x", "the file gives no list quant.ignore; give the whole list, quant.ignore=[...]"),
    ],
)
def test_an_override_that_cannot_be_applied_is_refused_on_one_line(load, override, message):
    with pytest.raises(UserError) as caught:
        load(override)
    assert str(caught.value).startswith(f"command line: {override}: ")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
