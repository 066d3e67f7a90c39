"""Every number has a bottom and a top, every text and list a length, and no product of tops leaves int64."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from typing import Any

import pytest
from config_walk import keys_of, leaves, plain_numbers, put
from pydantic import ValidationError

from qarl.comparison.study import Study
from qarl.config import Config
from qarl.config.limits import DEPTH, EPOCHS, POOL_TOKENS, RESPONSES, STEP_TOKENS, STEPS, VALUES
from qarl.config.source import read_source
from qarl.errors import UserError

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


def test_the_walk_finds_what_is_there():
    paths = {path for path, *_ in LEAVES}
    assert {
        *["optim.betas.[]", "rollout.stop.[]", "correction.reject.[].upper"],
        *["evaluation.tasks.[].data.max_rows", "logging.wandb.name", "data.columns.{}"],
        *["rollout.vllm.timeout_s"],
    } <= paths
    assert len(NUMBERS) > 80


def test_numbers_have_both_bounds_and_they_fit():
    for path, kind, bounds in NUMBERS:
        low = [bounds[key] for key in ("ge", "gt") if key in bounds]
        high = [bounds[key] for key in ("le", "lt") if key in bounds]
        assert low and high, f"{path} has no bottom, or no top"
        assert max(map(abs, low + high)) <= (INT64 if kind is int else FLOAT32), path


BOUNDS = {  # independent of the models: 0 if it turns something off, 1 for a count of what must be there
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


def test_a_text_or_list_has_a_length():
    literals = [leaf for leaf in LEAVES if leaf[1] in (str, list, dict)]
    without = [path for path, _, bounds in literals if "max_length" not in bounds and path not in FREE]
    assert without == []
    assert max(bounds.get("max_length", 0) for _, _, bounds in literals) <= 100_000


def _at(root: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(root))
    put(data, path, value)
    return data


BASE = {
    "model": {"path": "a/b"},
    "data": {"source": "task:arithmetic", "choices": {"options": ["a", "b"]}, "prompt_template": "{choices}"},
    "reward": {"functions": [{"name": "exact"}]},
    "train": {"steps": 3},
}
PLAIN = plain_numbers()


def _just_outside(kind: type, bounds: dict[str, Any]) -> list[int | float]:
    outside = [bounds[key] for key in ("lt", "gt") if key in bounds]
    for key, direction in (("le", 1), ("ge", -1)):
        if key in bounds:
            bound = bounds[key]
            outside.append(bound + direction if kind is int else math.nextafter(bound, direction * math.inf))
    return outside


def test_a_number_outside_is_one_line_with_its_key_the_value_and_what_is_valid():
    """All keys: just outside of each bound, and far outside of all."""
    for path, kind, bounds in PLAIN:
        for value in [*_just_outside(kind, bounds), -(10**400), 10**400]:
            with pytest.raises(UserError) as caught:
                read_source(_at(BASE, path, value), ()).config()
            line, given = str(caught.value), re.escape(f"{value:,}".replace(",", "")[:40])
            key = re.escape(".".join(keys_of(path)))
            assert re.fullmatch(rf"configuration: {key} = {given}\S*: must be .+", line), (line, value)


def test_products_of_tops_fit_or_are_refused_on_one_line(load):
    assert STEPS * EPOCHS * RESPONSES < INT64
    assert STEP_TOKENS * 2**20 < INT64 and POOL_TOKENS * 2**20 < INT64  # with a megabyte a token
    for overrides, key in (
        (["train.prompts_per_step=1000000", "rollout.n=10000"], "rollout.n = 10000"),
        (
            ["train.prompts_per_step=1000000", "rollout.n=10", "rollout.max_response_length=100000000"],
            "rollout.max_response_length = 100000000",
        ),
        (
            ["rollout.max_response_length=100000000", "rollout.max_num_seqs=100000", "train.prompts_per_step=400"],
            "rollout.max_num_seqs = 100000",
        ),
    ):
        with pytest.raises(UserError, match=f"^command line: {key}: .* possible") as caught:
            load(*overrides)
        assert "\n" not in str(caught.value)


def test_what_products_are_accepted_stays_within_int64(load):
    config = load(
        "train.prompts_per_step=1000000",
        "rollout.n=10",
        "data.max_prompt_length=50000",
        "rollout.max_response_length=50000",
        "rollout.max_num_seqs=100000",
    )
    assert config.responses_per_step * config.max_sequence_length == STEP_TOKENS
    assert config.kv_cache_tokens == POOL_TOKENS


@pytest.mark.parametrize("prompts", [1_000_003, 999_983, 720_720, 2**19, 1])
def test_the_nearest_divisor_is_found_at_once(load, prompts):
    total = min(prompts, 999_983) * 7
    wanted = max(2, total // 3 + 1)
    if total % wanted == 0:
        return
    with pytest.raises(UserError) as caught:
        load(f"train.prompts_per_step={total // 7}", "rollout.n=7", f"train.minibatch_size={wanted}")
    nearest = int(str(caught.value).rpartition(" ")[2])
    assert total % nearest == 0
    closer = range(wanted - abs(nearest - wanted) + 1, wanted + abs(nearest - wanted))
    assert not any(total % d == 0 for d in closer if d > 0)


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
    ids=["deep", "many", "large", "larger", "surrogate", "surrogate key", "infinite"],
)
def test_a_free_mapping_is_limited_as_a_whole(value, text):
    for key in ("data.task", "rollout.vllm.args", "objective.custom.kwargs"):
        with pytest.raises(ValidationError, match=text) as caught:
            Config.model_validate(_at(BASE, key, value))
        steps = tuple(key.split("."))
        assert steps == caught.value.errors()[0]["loc"][: len(steps)] or text in str(caught.value)


def test_a_lone_surrogate_is_refused_in_every_text():
    texts = [path for path, kind, _ in LEAVES if kind is str and not {"[]", "{}"} & set(path.split("."))]
    texts = [path for path in texts if path.partition(".")[0] in Config.model_fields]
    assert len(texts) > 20
    for path in texts:
        for text in ("\ud800", "a\udc80b"):
            with pytest.raises(ValidationError):
                Config.model_validate(_at(BASE, path, text))


@pytest.mark.parametrize(
    "path", ["model.path", "data.source", "train.run_dir", "checkpoint.resume", "objective.custom.path"]
)
def test_a_text_that_can_be_no_path_is_refused(path):
    for text in ("a\0b", "./" + "x" * 256, "./" + "é" * 128, "/" + "a/" * 2048, "./\udc80"):
        with pytest.raises(ValidationError):
            Config.model_validate(_at(BASE, path, text))


def test_a_path_of_another_users_home_is_for_the_machine_to_judge():
    make = partial(_at, BASE, "train.run_dir")
    assert Config.model_validate(make("~nosuchuser/x")).train.run_dir == "~nosuchuser/x"
