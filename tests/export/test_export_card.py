"""The model card: front matter the hub takes, the run's own numbers, no text that breaks out of its cell."""

import dataclasses
import json

import pytest
import yaml
from plain_settings import plain_config
from tiny_exports import TinyRun, save_run

from qarl.config import ModelConfig
from qarl.config.quant import scheme_of
from qarl.exporting.card import model_card
from qarl.inference.target import Target, resolve_target


def card(target: Target) -> str:
    return model_card(target, scheme_of(target.quant), "bfloat16", "pack-quantized", 2_500_000, 10_000_000)


def task(name: str, mean: float) -> dict:
    number = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
    return {"name": name, "prompts": 30, "samples": 4, "avg": number, "pass": {"1": number, "4": number}}


@pytest.fixture
def run(tiny_model, tmp_path) -> TinyRun:
    return save_run(tmp_path / "my_run", tiny_model())


def test_front_matter_names_a_base_of_the_hub_and_a_local_one_without_its_place(run):
    target = resolve_target(str(run.path))
    text = card(target)
    assert "base_model" not in yaml.safe_load(text.split("---\n")[1])
    assert str(run.path.parent) not in text and target.model.path not in text
    target = dataclasses.replace(target, model=ModelConfig(path="HuggingFaceTB/SmolLM2-135M-Instruct"))
    front = yaml.safe_load(card(target).split("---\n")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "finetune")
    assert front["library_name"] == "transformers" and {"w4a16", "compressed-tensors", "tbpo"} <= set(front["tags"])


def test_a_runs_card_says_how_it_was_trained(run):
    """At its last step, at an earlier one, and of bf16 masters, which are not the low-bit policy."""
    text = card(resolve_target(str(run.path)))
    assert "# my_run-w4a16" in text and "bit for bit" in text
    assert "| Steps | 4 of 6 |" in text and "| Objective | tbpo, advantage grpo" in text and "learner aligned" in text
    assert "0.100 in the first quarter, 0.400 in the last; 0.400 in step 4" in text
    assert "differ by 0 in the mean" in text and "temperature 1" in text
    assert "| Size | 2.5 MB, 0.250 of that in bfloat16 |" in text
    text = card(resolve_target(str(run.path), step=2))
    assert "| Steps | 2 of 6 |" in text and "0.200 in step 2" in text and "0.400" not in text
    text = card(resolve_target(str(run.path), quant={"scheme": "bf16"}))
    assert "master weights, unquantized: not the policy that generated in training" in text
    assert "compressed-tensors" not in yaml.safe_load(text.split("---\n")[1])["tags"]


def test_a_warm_start_is_no_reinforcement_learning(run):
    config = plain_config(objective={"name": "sft"}, rollout={"engine": "data"}, reward={"functions": []})
    text = card(dataclasses.replace(resolve_target(str(run.path)), run=config))
    assert "trained by supervised fine-tuning for 4 steps" in text and "reinforcement" not in text
    assert "| Responses | from the data, at most" in text and "| Rewards |" not in text and "| sft, token" in text


def test_evaluations_of_this_step_and_the_last_one_in_training_are_shown(run):
    lines = [{"step": step, "tasks": [task(f"during-{step}", 0.3)], "overall": {}} for step in (1, 3, 5)]
    (run.path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, step, scheme in (("same", 4, "w4a16"), ("older", 2, "w4a16"), ("other", 4, "bf16")):
        (run.path / "eval" / name).mkdir(parents=True)
        results = {"step": step, "scheme": scheme, "tasks": [task(f"eval-{name}", 0.5)]}
        (run.path / "eval" / name / "results.json").write_text(json.dumps(results))
    text = card(resolve_target(str(run.path)))
    assert "| during-3 | 3 | 30 | avg@4 0.300 (0.200 to 0.400) | pass@1 0.300 (0.200 to 0.400), pass@4" in text
    assert "| eval-same | 4 | 30 | avg@4 0.500" in text
    assert not any(name in text for name in ("during-1", "during-5", "eval-older", "eval-other"))


def test_text_of_others_stays_in_its_cell(run):
    (run.path / "evaluations.jsonl").write_text(
        json.dumps({"step": 4, "tasks": [task("x | y <b>\n# z", 0.5)], "overall": {}})
    )
    text = card(resolve_target(str(run.path)))
    assert "| x \\| y \\<b\\> # z | 4 |" in text
