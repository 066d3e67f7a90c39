"""`qarl generate`: completions, how they are shown, and what is refused."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from plain_settings import plain_config

from qarl.errors import UserError
from qarl.inference.generate import GenerateOptions, complete, render
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.policy.load import load_tokenizer
from qarl.types import Completion


def completions(path, texts, scheme="w4a16", **look) -> list[Completion]:
    quant = {"scheme": scheme} | ({"group_size": 32} if scheme == "w4a16" else {})
    target = resolve_target(str(path), quant=quant)
    return complete(target, texts, GenerateOptions(**{"max_new_tokens": 6, **look}), "cpu", lambda line: None)


def test_running_out_of_memory_is_a_line_with_what_to_lower(tiny_model, monkeypatch):
    def fail(*given, **named):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("qarl.inference.generate.open_policy", fail)
    with pytest.raises(UserError, match=r"^out of memory \(CUDA error: out of memory\); lower --max-new-tokens or --n"):
        completions(tiny_model(), ["7 + 5 ="])


@pytest.mark.parametrize("scheme", ["bf16", "w4a16"])
def test_greedy_is_the_likeliest_token_of_a_whole_forward_at_every_step(tiny_model, scheme):
    found = completions(tiny_model("qwen3"), ["7 + 5 ="], scheme)[0]
    quant = {"scheme": scheme} | ({"group_size": 32} if scheme == "w4a16" else {})
    policy = open_policy(resolve_target(str(tiny_model("qwen3")), quant=quant), device="cpu").policy
    ids = list(found.prompt_token_ids)
    for token, logprob in zip(found.token_ids, found.logprobs, strict=True):
        row = policy.sampler.logits(policy.sampler.states([ids])[-1:])[0].log_softmax(-1)
        assert token == row.argmax().item()
        assert logprob == row[token].item()
        ids.append(token)


def test_a_directory_that_is_no_run_and_no_model_is_refused_as_what_was_given(tmp_path):
    with pytest.raises(UserError, match=r"holds neither a run's config\.yaml nor a model's config\.json; give a run"):
        resolve_target(str(tmp_path))


def test_a_run_that_is_not_there_is_looked_for_on_no_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "fedcba":
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    with pytest.raises(UserError, match=r"^runs/my: no such run; runs holds a, b, c, d, e and 1 more$"):
        resolve_target("runs/my")


def test_samples_at_a_temperature_differ_by_the_seed_alone_and_come_by_prompt(tiny_model):
    found, same, other = (completions(tiny_model(), ["one", "two"], n=3, temperature=1.0, seed=s) for s in (3, 3, 4))
    ids = [[c.token_ids for c in drawn] for drawn in (found, same, other)]
    assert ids[0] == ids[1] != ids[2]
    assert [(c.prompt, c.sample) for c in found] == [(t, i) for t in ("one", "two") for i in range(3)]
    assert len({tuple(c.token_ids) for c in found}) == 6


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"min_p": 0.9999}, {"top_p": 1e-6}])
def test_of_the_likeliest_token_alone_draws_are_greedy(tiny_model, cut):
    greedy = completions(tiny_model(), ["one"])[0]
    drawn = completions(tiny_model(), ["one"], temperature=1.0, **cut)[0]
    assert drawn.token_ids == greedy.token_ids and set(drawn.logprobs) == {0.0}


@pytest.mark.parametrize(
    ("template", "look", "text"),
    [
        (True, {}, "<|user|>hi\n<|assistant|>"),
        (False, {}, "hi"),
        (True, {"chat": False}, "hi"),
        (True, {"system": "be brief"}, "<|system|>be brief\n<|user|>hi\n<|assistant|>"),
    ],
)
def test_a_model_gets_its_chat_template_and_the_system_message_first(tiny_model, template, look, text):
    model = tiny_model() if template else tiny_model(chat_template=False)
    target = resolve_target(str(model))
    assert render(target, load_tokenizer(target.model), ["hi"], GenerateOptions(**look))[0].text == text


@pytest.mark.parametrize(
    ("look", "message"),
    [
        ({"n": 2}, "--n: 2 samples at temperature 0 are all the same"),
        ({"top_p": 0.5}, "--top-p: 0.5 does nothing at temperature 0"),
        ({"top_p": 0.0, "temperature": 1.0}, "--top-p: 0.0 is not a probability"),
        ({"temperature": float("nan")}, "--temperature: nan is not a temperature"),
        ({"chat": False, "system": "be brief"}, "--system: is part of the chat template"),
        ({"max_new_tokens": 500}, "--prompt 1: its 24 tokens and 500 new ones exceed the context of 512"),
    ],
)
def test_options_that_mean_nothing_are_refused(tiny_model, look, message):
    with pytest.raises(UserError, match=message):
        completions(tiny_model(), ["hi"], **{"max_new_tokens": 6, **look})


def test_a_template_that_refuses_or_is_not_there_is_one_line(tiny_model, tmp_path):
    with pytest.raises(UserError, match="has no chat template; give --no-chat"):
        completions(tiny_model(chat_template=False), ["hi"], chat=True)
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ raise_exception('only in French') }}")
    with pytest.raises(UserError, match=r"the chat template refuses the prompt \(--no-chat .*only in French"):
        completions(model, ["hi"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n", r"--prompt-file: .*prompt.txt: is empty"),
        (b"\xff", "not UTF-8 text"),
        (None, r"--prompt-file: .*prompt.txt: no such file"),
    ],
)
def test_a_file_that_is_no_prompt_is_refused(tiny_model, run_command, tmp_path, content, message):
    if content is not None:
        (tmp_path / "prompt.txt").write_bytes(content)
    code, _, err = run_command("generate", tiny_model(), "--prompt", "hi", "--prompt-file", tmp_path / "prompt.txt")
    assert code == 2 and re.search(message, err)


def test_json_lines_hold_ids_and_log_probs_of_prompts_and_then_of_the_file(tiny_model, run_command, tmp_path):
    (tmp_path / "b.txt").write_text("b\nb\n")
    options = f"--prompt a --prompt-file {tmp_path}/b.txt --n 2 --temperature 1 --max-new-tokens 4 --scheme fp8 --json"
    code, out, _ = run_command("generate", tiny_model(), *options.split())
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(row["prompt"], row["sample"]) for row in rows] == [("a", 0), ("a", 1), ("b\nb\n", 0), ("b\nb\n", 1)]
    for row in rows:
        assert len(row["token_ids"]) == len(row["logprobs"]) <= 4
        assert row["mean_logprob"] == pytest.approx(sum(row["logprobs"]) / len(row["logprobs"]))
        assert row["finish_reason"] in ("stop", "length")
    tokenizer = load_tokenizer(resolve_target(str(tiny_model())).model)
    assert rows[0]["completion"] == tokenizer.decode(rows[0]["token_ids"], skip_special_tokens=True)


def test_a_completion_cannot_drive_the_terminal(tiny_model, run_command, monkeypatch):
    made = Completion("hi", "red \x1b[31m\r\nsecond line\u202e", [5, 6], [-0.5, -1.5], "length", 0, 0, [4])
    monkeypatch.setattr("qarl.inference.generate.complete", lambda *_: [made])
    code, out, _ = run_command("generate", tiny_model(), "--prompt", "hi")
    assert code == 0
    assert out.splitlines() == [
        "prompt 1, sample 1: 2 tokens, cut at --max-new-tokens, mean log-prob -1.000",
        "red \\x1b[31m\\r",
        "second line\\u202e",
    ]
    assert "\x1b" not in run_command("generate", tiny_model(), "--prompt", "hi", "--json")[1]


def test_bad_input_is_one_line_and_exit_code_2(tiny_model, run_command):
    code, out, err = run_command("generate", tiny_model())
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: --prompt: no prompt")


THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}<think></think>{% endif %}"
)


def test_arguments_of_the_template_are_the_runs_own_unless_given(tiny_model, tmp_path):
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    (model / "chat_template.jinja").write_text(THINKING)
    config = plain_config(model={"path": str(model)}, data={"chat_template_kwargs": {"enable_thinking": False}})
    run = replace(resolve_target(str(model)), run=config)
    tokenizer = load_tokenizer(run.model)
    for target, given, text in (
        (run, None, "hi<think></think>"),
        (run, {}, "hi"),
        (replace(run, run=None), None, "hi"),
    ):
        assert render(target, tokenizer, ["hi"], GenerateOptions(template_kwargs=given))[0].text == text
    with pytest.raises(UserError, match="--chat-template-kwargs: belongs to the chat template"):
        render(run, tokenizer, ["hi"], GenerateOptions(chat=False, template_kwargs={"enable_thinking": False}))
    with pytest.raises(UserError, match=r"chat_template_kwargs.messages = 1: is set by qarl"):
        completions(model, ["hi"], template_kwargs={"messages": 1})
