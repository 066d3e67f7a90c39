"""Chat rows and templates that nobody would write on purpose: each is a prompt, or one line that names the row."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from qarl.config.data import DataConfig
from qarl.data import build_prompts
from qarl.errors import UserError


def one_line(error: BaseException) -> bool:
    return "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 1500


# prompt of the row -> the text, or what the line says
CONVERSATIONS = {
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}], "<|user|>a\nb\n<|assistant|>"),
    "extra keys": ([{"role": "user", "content": "a", "name": "Bo", "id": 7, "x": None}], "<|user|>a\n<|assistant|>"),
    "null content of a tool call": (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}],
        "<|user|>a\n<|assistant|>None\n<|assistant|>",
    ),
}
REFUSED_CONVERSATIONS = {
    "null content": ([{"role": "user", "content": None}], r"message 0 of `prompt` \(user\) has no content \(null\)"),
    "no role": ([{"content": "a"}], "expected text or a list of {role, content} messages"),
    "an image": ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "a part that is str 'image'; only"),
    "a part with null text": ([{"role": "user", "content": [{"type": "text", "text": None}]}], "only text parts"),
    "an empty list": ([], "`prompt` is list"),
    "null": (None, "`prompt` is null, expected text or a list of messages; drop the row"),
}


@pytest.fixture
def build(tmp_path, tokenizer, monkeypatch):
    """build(rows, chat template, context, **data keys) -> prompts of a file with these rows."""

    def make(*rows: dict, template: str | None = None, context: int = 10**4, **keys: object):
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        if template is not None:
            monkeypatch.setattr(tokenizer, "chat_template", template)
        return build_prompts(DataConfig(**{"source": str(path), **keys}), tokenizer, context, 1)[0]

    return make


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_chat_row_is_rendered(build, name):
    prompt, text = CONVERSATIONS[name]
    assert build({"prompt": prompt})[0].text == text


@pytest.mark.parametrize("name", REFUSED_CONVERSATIONS)
def test_a_chat_row_is_refused_by_its_number(build, name):
    prompt, said = REFUSED_CONVERSATIONS[name]
    with pytest.raises(UserError, match=said) as caught:
        build({"prompt": "fine"}, {"prompt": prompt})
    assert one_line(caught.value) and "data: row 1: " in str(caught.value)


def test_a_table_of_messages_has_every_key_in_every_message(tmp_path, build):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"id": 1}]}]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": messages}]), path)
    keys = "{% for m in messages %}{{ m | list | join(' ') }};{% endfor %}"
    assert build(template=keys, source=str(path))[0].text == "role content;role content tool_calls;"  # a null is no key


TEMPLATES = {
    "TypeError": "{{ messages[0]['content'] + 1 }}",
    "raised": "{{ raise_exception('a\n\x1b[31mb') }}",
    "too much": "{{ 'x' * 20000000 }}",
    "surrogate": "{{ '\\ud800' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_whatever_a_chat_template_does_is_one_line(build, name):
    with pytest.raises(UserError, match="data: row 0: ") as caught:
        build({"prompt": "p"}, template=TEMPLATES[name])
    assert one_line(caught.value)


@pytest.mark.parametrize("template", ["{prompt:>1001}", "{n:.10001f}", "{prompt:{n}}", "{n.x}", "{n[0]}", "{}"])
def test_a_template_that_asks_for_width_or_more_than_columns_is_refused(template, build):
    with pytest.raises((ValidationError, UserError)):
        build({"prompt": "p", "n": 999999999}, prompt_template=template)
