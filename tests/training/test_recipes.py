"""Each recipe runs two steps with a tiny model of its family, on a file with the columns of its data set."""

import json
from pathlib import Path

import pytest
import yaml
from run_faults import recorded

import qarl
from qarl.rewards.mathematics import math

RECIPES = sorted((Path(__file__).parents[2] / "configs" / "recipes").glob("*.yaml"))
FAMILIES = {"qwen2.5": "qwen2", "qwen3-8b": "qwen3", "qwen3-1.7b": "qwen3", "qwen3-30b": "qwen3_moe"}
# OpenR1-Math-46k as its page on the hub shows it; DAPO-Math-17k and the sanity test have the same of verl's columns.
ROW = {
    "data_source": "openr1",
    "prompt": [{"role": "system", "content": "Think step by step."}, {"role": "user", "content": "What is 3 * 4?"}],
    "ability": "math",
    "reward_model": {"ground_truth": "12", "style": "rule"},
    "extra_info": {"index": -1, "split": "default"},
}
MATH_ROW = {  # MATH as its page on the hub shows it
    "problem": "What is $3 \\cdot 4$?",
    "level": "Level 1",
    "solution": "We multiply: $3 \\cdot 4 = \\boxed{12}$.",
    "type": "Prealgebra",
}
SMALL = {
    "model.device": "cpu",
    "model.dtype": "float32",
    "quant.scale_dtype": "float32",
    "rollout.n": 2,
    "rollout.max_response_length": 4,
    "rollout.kv_cache_tokens": None,
    "data.max_prompt_length": 200,
    "optim.offload": False,
    "train.steps": 2,
    "train.prompts_per_step": 2,
    "train.minibatch_size": 2,
    "evaluation.tasks": [],
    "evaluation.every": None,
    "logging.tensorboard": False,
    "logging.console": "none",
}


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_recipe_trains(recipe, tiny_model, tmp_path):
    family = next(family for start, family in FAMILIES.items() if recipe.stem.startswith(start))
    data = tmp_path / "rows.jsonl"
    row = MATH_ROW if recipe.stem.endswith("-math") else ROW
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    groups = {} if "bf16" in recipe.read_text() else {"quant.group_size": 32}
    own = groups | {
        "model.path": str(tiny_model(family)),
        "data.source": str(data),
        "train.run_dir": str(tmp_path / "run"),
    }
    result = qarl.train(str(recipe), SMALL | own)
    metrics = recorded(tmp_path / "run")
    assert result.exit_code == 0 and [m["step"] for m in metrics] == [1, 2]
    assert all(m["mismatch/delta_abs_max"] == 0.0 for m in metrics)
    columns = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]["columns"]
    truth = {"solution": MATH_ROW["solution"], "reward_model.ground_truth": "12"}[columns["answer"]]
    assert math([r"So it is $\boxed{12}$.", r"$\boxed{13}$"], ["", ""], answer=[truth] * 2) == [1.0, 0.0]
