"""Chat rows and templates that nobody would write on purpose: each is a prompt, or one line that names the row."""

from __future__ import annotations

import json
import random

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError
from tiny_models import CHAT_TEMPLATE

from qarl.config.data import DataConfig
from qarl.data import build_prompts
from qarl.errors import UserError


def one_line(error: BaseException) -> bool:
    return "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 1500


# prompt of the row -> the text, or what the line says
CONVERSATIONS = {
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "<|user|>a\nb\n<|assistant|>",
    ),
    "parts without a type": ([{"role": "user", "content": [{"text": "a"}]}], "<|user|>a\n<|assistant|>"),
    "parts that are text": ([{"role": "user", "content": ["a", "b"]}], "<|user|>a\nb\n<|assistant|>"),
    "no parts": ([{"role": "user", "content": []}], "<|user|>\n<|assistant|>"),
    "extra keys": ([{"role": "user", "content": "a", "name": "Bo", "id": 7, "x": None}], "<|user|>a\n<|assistant|>"),
    "null content of a tool call": (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}],
        "<|user|>a\n<|assistant|>None\n<|assistant|>",
    ),
}
REFUSED_CONVERSATIONS = {
    "null content": ([{"role": "user", "content": None}], r"message 0 of `prompt` \(user\) has no content \(null\)"),
    "no content": ([{"role": "user", "content": "a"}, {"role": "user"}], r"message 1 of .* \(user\) has no content"),
    "no role": ([{"content": "a"}], "expected text or a list of {role, content} messages"),
    "a null role": ([{"role": None, "content": "a"}], "message 0 of `prompt`: its role is null"),
    "a role that is a list": ([{"role": ["user"], "content": "a"}], "its role is list"),
    "an image": ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "a part that is str 'image'; only"),
    "a null part": ([{"role": "user", "content": [None]}], "a part that is null"),
    "a part with null text": ([{"role": "user", "content": [{"type": "text", "text": None}]}], "only text parts"),
    "a number": ([{"role": "user", "content": 5}], "its content is int 5"),
    "an object": ([{"role": "user", "content": {"a": 1}}], "its content is dict"),
    "a list of lists": ([[1], [2]], "`prompt` is list"),
    "an empty list": ([], "`prompt` is list"),
    "null": (None, "`prompt` is null, expected text or a list of messages; drop the row"),
    "an object alone": ({"role": "user", "content": "a"}, "`prompt` is dict"),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_chat_row_is_rendered(tmp_path, tokenizer, name):
    prompt, text = CONVERSATIONS[name]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": prompt}))
    prompts, _ = build_prompts(DataConfig(source=str(path)), tokenizer, 10**4, 1)
    assert prompts[0].text == text


@pytest.mark.parametrize("name", REFUSED_CONVERSATIONS)
def test_a_chat_row_is_refused_by_its_number(tmp_path, tokenizer, name):
    prompt, said = REFUSED_CONVERSATIONS[name]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps({"prompt": prompt}))
    with pytest.raises(UserError, match=said) as caught:
        build_prompts(DataConfig(source=str(path)), tokenizer, 10**4, 1)
    assert one_line(caught.value) and "data: row 1: " in str(caught.value)


def test_a_table_of_messages_has_every_key_in_every_message(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"id": 1}]}]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": messages}]), path)
    tokenizer.chat_template = "{% for m in messages %}{{ m | list | join(' ') }};{% endfor %}"
    try:
        prompts, _ = build_prompts(DataConfig(source=str(path)), tokenizer, 10**4, 1)
    finally:
        tokenizer.chat_template = CHAT_TEMPLATE
    assert prompts[0].text == "role content;role content tool_calls;"  # a null is no key


TEMPLATES = {
    "TypeError": "{{ messages[0]['content'] + 1 }}",
    "ZeroDivisionError": "{{ 1 / 0 }}",
    "undefined": "{{ nothing.here }}",
    "raised": "{{ raise_exception('a\n\x1b[31mb') }}",
    "syntax": "{% for %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "too much": "{{ 'x' * 20000000 }}",
    "overflow": "{{ 'x' * 10 ** 30 }}",
    "key": "{{ {}['a']['b'] }}",
    "not a text": "{{ messages[0]['content'].nope() }}",
    "surrogate": "{{ '\\ud800' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_whatever_a_chat_template_does_is_one_line(tmp_path, tokenizer, name):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "p"}))
    tokenizer.chat_template = TEMPLATES[name]
    try:
        with pytest.raises(UserError, match="data: row 0: ") as caught:
            build_prompts(DataConfig(source=str(path)), tokenizer, 10**4, 1)
    finally:
        tokenizer.chat_template = CHAT_TEMPLATE
    assert one_line(caught.value)


SPECS = [
    *["{prompt:>99999999999}", "{prompt:.99999999999}", "{prompt:>1001}", "{n:099999999999d}"],
    *["{n:.100000000f}", "{prompt:{n}}", "{prompt:{prompt}}", "{n:>{n}.{n}}", "{prompt.x}", "{prompt[0]}"],
    *["{0}", "{}", "{prompt!x}", "{"],
]


@pytest.mark.parametrize("template", SPECS)
def test_a_template_that_asks_for_width_or_more_than_columns_is_refused(template, tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "p", "n": 999999999}))
    with pytest.raises((ValidationError, UserError)):
        build_prompts(DataConfig(source=str(path), prompt_template=template), tokenizer, 10**4, 1)


def test_random_templates_fill_or_are_refused(tmp_path, tokenizer):
    rng, path = random.Random(0), tmp_path / "a.jsonl"
    row = {"prompt": "p" * 1000, "n": -3, "f": 0.1, "l": [1], "d": {"a": 1}, "z": None}
    path.write_text(json.dumps(row))
    pieces = [
        *"{}nfldz:ds%,x\0 ",
        *["{{", "}}", "prompt", "!r", "!s", "!x", ">9", "999999999999", ".3", ".a", "[0]", "\ud800"],
    ]
    pieces += ["{prompt}", "{n}", "{f:.2f}", "{z!r:>4}"]
    filled = 0
    for _ in range(1000):
        template = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 7)))
        fields = {"prompt_template": template, "chat_template": False, "max_prompt_length": 10**4}
        try:
            config = DataConfig(source=str(path), **fields)
            prompts, _ = build_prompts(config, tokenizer, 10**7, 1)
        except (ValidationError, UserError) as error:
            assert isinstance(error, ValidationError) or one_line(error), error
            continue
        filled += 1
        assert prompts[0].text == template.format(**row)
    assert filled > 50


def test_a_template_that_multiplies_a_long_prompt_is_refused(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "p" * 1_000_000}))
    config = DataConfig(source=str(path), prompt_template="{prompt}" * 1000, chat_template=False)
    with pytest.raises(UserError, match="row 0: the prompt would have more than 10,000,000 characters"):
        build_prompts(config, tokenizer, 10**8, 1)
