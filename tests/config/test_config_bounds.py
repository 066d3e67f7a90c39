"""Numbers have bounds, texts and lists a maximum length, and products of the largest values fit int64."""

import json
import math
import re
from typing import Any

import pytest
from config_walk import keys_of, leaves, plain_numbers, put
from plain_settings import plain_settings
from pydantic import ValidationError

from qarl.comparison.study import Study
from qarl.config import Config
from qarl.config.source import read_source
from qarl.errors import UserError
from qarl.inputs.limits import DEPTH, EPOCHS, POOL_TOKENS, RESPONSES, STEP_TOKENS, STEPS, VALUES

INT64 = 2**63
FLOAT32 = 3.4e38
# Free mappings, limited as a whole (`value_faults`), and parts of a study that become a configuration.
FREE = {
    *["data.task", "reward.functions.[].options", "rollout.vllm.args", "distributed.config"],
    *["objective.custom.kwargs", "config", "profiles.{}", "variants.{}", "evaluation.held_out.task"],
    *["evaluation.tasks.[].data.task", "evaluation.tasks.[].reward.[].options"],
}

LEAVES = [leaf for root in (Config, Study) for leaf in leaves(root, [], "")]
NUMBERS = [leaf for leaf in LEAVES if leaf[1] in (int, float)]


def test_numbers_have_both_bounds_and_texts_and_lists_a_maximum_length():
    paths = {path for path, *_ in LEAVES}
    assert {  # the walk finds nested fields
        *["optim.betas.[]", "rollout.stop.[]", "correction.reject.[].upper", "rollout.vllm.timeout_s"],
        *["evaluation.tasks.[].data.max_rows", "logging.wandb.name", "data.columns.{}"],
    } <= paths and len(NUMBERS) > 80
    for path, kind, bounds in LEAVES:
        if kind in (int, float):
            low, high = ([bounds[key] for key in keys if key in bounds] for keys in (("ge", "gt"), ("le", "lt")))
            assert low and high, f"{path} lacks a bound"
            assert max(map(abs, low + high)) <= (INT64 if kind is int else FLOAT32), path
        else:
            assert path in FREE or bounds["max_length"] <= 100_000, path


BOUNDS = {  # what the numbers mean: 0 turns a feature off, 1 is the smallest count
    ("ge", 0): "train.seed rollout.top_k objective.tbpo.kl_coef rollout.vllm.max_restarts reward.max_failed_frac"
    " diagnostics.shadow_every diagnostics.backward_every",
    ("ge", 1): "train.steps rollout.n rollout.max_batched_tokens rollout.vllm.data_parallel diagnostics.tokens"
    " objective.tbpo.seq_tis_imp_ratio_cap",
    ("ge", 0.0001): "rollout.temperature objective.sapo.sapo_tau_neg",
    ("gt", 0): "rollout.top_p rollout.vllm.timeout_s correction.upper",
    ("gt", 1): "objective.dual_clip_grpo.clip_ratio_c",
    ("le", 1): "rollout.top_p",
    ("lt", 1): "rollout.min_p optim.betas.[] objective.tbpo.dvp_rho correction.veto rollout.vllm.memory_frac",
}


@pytest.mark.parametrize(("bound", "keys"), BOUNDS.items(), ids=str)
def test_a_bound_is_what_the_meaning_of_the_number_allows(bound, keys):
    bounds = {path: found for path, _, found in NUMBERS}
    assert {key: bounds[key].get(bound[0]) for key in keys.split()} == dict.fromkeys(keys.split(), bound[1])


def _at(root: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(root))
    put(data, path, value)
    return data


BASE = plain_settings(data={"choices": {"options": ["a", "b"]}, "prompt_template": "{choices}"})
PLAIN = plain_numbers()


def _just_outside(kind: type, bounds: dict[str, Any]) -> list[int | float]:
    outside = [bounds[key] for key in ("lt", "gt") if key in bounds]
    for key, direction in (("le", 1), ("ge", -1)):
        if key in bounds:
            bound = bounds[key]
            outside.append(bound + direction if kind is int else math.nextafter(bound, direction * math.inf))
    return outside


def test_a_number_out_of_bounds_is_one_line_with_its_key_the_value_and_what_is_valid():
    """Every key: just outside of each bound, and far outside."""
    for path, kind, bounds in PLAIN:
        for value in [*_just_outside(kind, bounds), -(10**400), 10**400]:
            with pytest.raises(UserError) as caught:
                read_source(_at(BASE, path, value), ()).config()
            line, given = str(caught.value), re.escape(f"{value:,}".replace(",", "")[:40])
            key = re.escape(".".join(keys_of(path)))
            assert re.fullmatch(rf"configuration: {key} = {given}\S*: must be .+", line), (line, value)


MANY = "train.prompts_per_step=1000000"
LONG = "rollout.max_response_length=100000000"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([MANY, "rollout.n=10000"], "rollout.n = 10000"),
        ([MANY, "rollout.n=10", LONG], "rollout.max_response_length = 100000000"),
        ([LONG, "rollout.max_num_seqs=100000", "train.prompts_per_step=400"], "rollout.max_num_seqs = 100000"),
    ],
)
def test_a_product_of_large_values_is_refused_on_one_line(load, overrides, key):
    with pytest.raises(UserError, match=f"^command line: {key}: .* possible") as caught:
        load(*overrides)
    assert "\n" not in str(caught.value)


def test_the_largest_accepted_products_fit_int64(load):
    assert STEPS * EPOCHS * RESPONSES < INT64
    assert STEP_TOKENS * 2**20 < INT64 and POOL_TOKENS * 2**20 < INT64  # with a megabyte per token
    lengths = ["data.max_prompt_length=50000", "rollout.max_response_length=50000"]
    config = load(MANY, "rollout.n=10", *lengths, "rollout.max_num_seqs=100000")
    assert config.responses_per_step * config.max_sequence_length == STEP_TOKENS
    assert config.kv_cache_tokens == POOL_TOKENS


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": _nested(DEPTH)}, f"nested deeper than {DEPTH} levels"),
        ({"a": [0] * VALUES}, f"more than {VALUES:,} values"),
        ({"a": [2**63]}, "must fit 64 bits"),
        ({"a": -(10**400)}, "must fit 64 bits"),
        ({"a": {"b": "x\ud800"}}, "lone surrogate"),
        ({"\udfff": 1}, "lone surrogate"),
        ({"a": math.inf}, "finite"),
    ],
    ids=range(7),
)
def test_a_free_mapping_is_limited_as_a_whole(value, text):
    for key in ("data.task", "rollout.vllm.args", "objective.custom.kwargs"):
        with pytest.raises(ValidationError, match=text) as caught:
            Config.model_validate(_at(BASE, key, value))
        steps = tuple(key.split("."))
        assert steps == caught.value.errors()[0]["loc"][: len(steps)] or text in str(caught.value)
