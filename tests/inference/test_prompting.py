"""A run, and what was exported of it, are prompted as the run was trained, unless an option says otherwise."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from plain_settings import plain_settings
from whole_pieces import whole_pieces

from qarl.config import EvaluationConfig
from qarl.errors import UserError
from qarl.evaluation.evaluate import _loaded as loaded
from qarl.evaluation.request import Request, prompting
from qarl.exporting.job import export_target
from qarl.inference.generate import GenerateOptions, complete, render
from qarl.inference.target import resolve_target
from qarl.policy.load import load_model, load_tokenizer
from qarl.storage.checkpoint import CheckpointStore

CHAT, TEXT = "<|user|>hi\n<|assistant|>", "hi"
SYSTEM = "<|system|>count\n<|user|>hi\n<|assistant|>"


@pytest.fixture
def placed(tiny_model, tmp_path):
    """placed(data, rollout, scheme of the export) -> {"run": directory, "export": directory} of one policy."""
    numbers = itertools.count()

    def make(data: dict[str, Any], rollout: dict[str, Any] | None = None, scheme: str = "bf16") -> dict[str, Path]:
        folder = tmp_path / str(next(numbers))
        run, out = folder / "run", folder / "export"
        run.mkdir(parents=True)
        config = plain_settings(
            model={"path": str(tiny_model())},
            quant={"scheme": "w8a8", "kv_cache_dtype": "fp8"},
            data=data,
            rollout=rollout or {},
            train={"steps": 2, "run_dir": str(run)},
        )
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        (run / "metrics.jsonl").write_text("")
        (run / "environment.json").write_text("{}")
        masters = dict(load_model(resolve_target(str(tiny_model())).model).named_parameters())
        state = {"version": 2, "snapshot_sha256": "0" * 64}
        CheckpointStore(run / "checkpoints", 0).save(2, whole_pieces({"masters": masters}), state)
        target = resolve_target(str(run), quant={"scheme": scheme})
        export_target(target, out, dtype=torch.bfloat16, max_shard_bytes=10**9)
        return {"run": run, "export": out}

    return make


CASES = [
    ({"chat_template": False}, {}, TEXT),
    ({"chat_template": False}, {"chat": True}, CHAT),
    ({"chat_template": True}, {"chat": False}, TEXT),
    ({"system_prompt": "count"}, {}, SYSTEM),
    ({"system_prompt": "sing"}, {"system": "count"}, SYSTEM),
    ({"chat_template": False, "prompt_template": "Q: {prompt}"}, {}, TEXT),
]


@pytest.mark.parametrize(("data", "options", "text"), CASES)
def test_generate_and_eval_prompt_as_the_run_did(placed, data, options, text):
    """Eval by the keys of `data` with which a preset's prompts are made."""
    for place in placed(data, scheme="fp8").values():
        target = resolve_target(str(place))
        assert render(target, load_tokenizer(target.model), ["hi"], GenerateOptions(**options))[0].text == text, place
        found = prompting(resolve_target(str(place)), Request(data=("gsm8k",), **options))
        system = "count" if text == SYSTEM else None
        assert (found["chat_template"], found["system_prompt"]) == (text != TEXT, system), place
        assert target.quant.kv_cache_dtype == "fp8", place
        own = prompting(resolve_target(str(place)), Request(**options))
        assert own.keys() <= {"chat_template", "system_prompt"} and ("chat" in options) == ("chat_template" in own)


def test_eval_gives_the_template_the_arguments_of_the_run(placed):
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    for place in placed({"chat_template_kwargs": off}).values():
        target, sets = resolve_target(str(place)), ("gsm8k",)
        for options, expected in (({}, off), ({"template_kwargs": on}, on), ({"chat": False}, None)):
            assert prompting(target, Request(data=sets, **options)).get("chat_template_kwargs") == expected, place
        with pytest.raises(UserError, match="--chat-template-kwargs: belongs to the chat template"):
            prompting(target, Request(data=sets, chat=False, template_kwargs=on))


def test_completions_end_as_the_runs_responses_did(placed):
    """At its stop strings, which an option replaces, and at its stop tokens."""

    def completed(rollout: dict[str, Any], **look: Any) -> list[int]:
        target = resolve_target(str(placed({}, rollout)["export"]))
        found = complete(target, ["hi"], GenerateOptions(max_new_tokens=12, **look), "cpu", lambda line: None)
        texts.append(found[0].text)
        return found[0].token_ids

    texts: list[str] = []
    whole = completed({})
    assert len(whole) == 12
    number = next(i for i in range(3, 12) if whole[i] not in whole[:i] and texts[0][: i + 1].isascii())
    token, letter = whole[number], texts[0][number]
    assert completed({"stop_token_ids": [token]}) == whole[: number + 1]
    assert completed({"stop": [letter]}) == whole[: number + 1] and texts[-1] == texts[0][:number]
    assert completed({"stop": [letter]}, stop=()) == whole
    assert completed({"stop": ["never"]}, stop=(letter,)) == whole[: number + 1]


def test_a_model_of_unknown_prompting_gets_the_template_that_its_tokenizer_has(tiny_model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "2 + 2", "answer": "#### 4"}) + "\n")
    section = EvaluationConfig.model_validate({"tasks": [{"preset": "gsm8k", "path": str(rows)}]})
    for template in (True, False):
        target, said = resolve_target(str(tiny_model(chat_template=template))), []
        (task,) = loaded(section, target, load_tokenizer(target.model), {}, said.append)
        assert task.prompts[0].text.startswith("<|user|>") == template
        assert said == ([] if template else ["prompts as plain text, without a template"])
