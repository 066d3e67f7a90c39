"""A configuration that is accepted trains: two steps with every number at its maximum, and at its minimum."""

from copy import deepcopy
from typing import Any

import pytest
from config_walk import extreme, keys_of, plain_numbers
from pydantic import ValidationError
from tiny_runs import settings, write_config

from qarl.config import Config

# Sizes and counts, which decide how long a run takes and how much memory; their tops are in tests/config.
SIZES = {
    "train.steps",
    "train.prompts_per_step",
    "train.minibatch_size",
    "train.epochs",
    "train.threads",
    "rollout.n",
    "rollout.max_response_length",
    "rollout.kv_cache_tokens",
    "data.max_prompt_length",
    "data.max_rows",
    "model.max_length",
    "reward.workers",
    "reward.timeout_s",
    "reward.max_failed_frac",
    "reward.memory_gib",
    "rollout.dynamic_sampling.max_rounds",  # a tiny model's rewards are all equal, so all rounds are run
    "rollout.dynamic_sampling.oversample",
}
ON_A_GPU = {"diagnostics.backward_every"}  # refused elsewhere
OF_EXPERTS = ("router_aux_coef", "router_z_coef", "router_shift_floor", "routing_every")  # refused without
SECTIONS: dict[str, dict[str, Any]] = {
    "tbpo": {},
    "dual_clip_grpo": {"correction": {"level": "token"}, "optim": {"name": "muon", "schedule": "linear"}},
    "mis_gspo": {"optim": {"schedule": "cosine"}, "quant": {"learner": "full_precision"}},
}


@pytest.mark.parametrize(("objective", "top"), [("tbpo", True), ("dual_clip_grpo", False), ("mis_gspo", True)])
def test_every_number_at_its_end_trains(qarl, tiny_model, tmp_path, objective, top):
    small = {"train": {"steps": 2, "prompts_per_step": 2, "minibatch_size": 2}, "rollout": {"n": 2}}
    data = settings(tiny_model("llama"), objective={"name": objective}, **small, **SECTIONS[objective])
    data["rollout"]["max_response_length"] = 4
    taken = 0
    for path, kind, bounds in plain_numbers():
        if path in SIZES | ON_A_GPU or (path.startswith("objective.") and path.split(".")[1] != objective):
            continue
        if path.endswith(OF_EXPERTS):
            continue
        *sections, key = keys_of(path)
        tried = here = deepcopy(data)
        for section in sections:
            here = here.setdefault(section, {})
        here[key] = extreme(kind, bounds, top)
        try:
            Config.model_validate(tried)
        except ValidationError:  # not beside what stands there already
            continue
        data, taken = tried, taken + 1
    assert taken > 40
    done = qarl.run("train", write_config(tmp_path / "c.yaml", data), cwd=tmp_path)
    assert done.code == 0, done.err
