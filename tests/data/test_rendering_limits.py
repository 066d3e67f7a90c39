"""A chat template that does not end, or takes all memory, is one line; and the time that templates see is fixed."""

import time
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest
from templates import DATED, PLAIN
from tiny_models import byte_tokenizer

from qarl.config.data import DataConfig
from qarl.data import build_prompts, rendering
from qarl.data.conversation import ChatTemplate
from qarl.data.rendering import LimitExceeded, Refused, limited
from qarl.errors import UserError

LOOP = "{% for i in range(100000) %}"
ENDLESS = {"loops": LOOP * 3 + "{% endfor %}" * 3, "a power": "{{ (messages[0].content | length) ** (10 ** 9) }}"}
LARGE = {
    "doubled text": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "replacement": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
}


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(rendering, "CPU_SECONDS", 0.3)
    monkeypatch.setattr(rendering, "MEMORY_BYTES", 2**28)


def refused(source: str) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = source
    tokenizer.name_or_path = "org/model"
    good, bad = [{"role": "user", "content": "x"}], [{"role": "user", "content": "x" * 100}]
    with pytest.raises(UserError) as caught:
        ChatTemplate(tokenizer).render([bad, good], ["data: row 0", "data: row 1"])
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_refused(name):
    said = refused(ENDLESS[name])
    assert said.startswith("data: row 0: the chat template of org/model takes more than 0.3 s of CPU time"), said


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_takes_all_memory_is_refused(name):
    said = refused(LARGE[name])
    assert said.startswith("data: row 0: the chat template of org/model takes more than "), said


def test_only_the_row_that_exceeds_the_limit_is_named():
    items = [0.0, 0.0, 1.0, 0.0]

    def work(seconds: float) -> str:
        deadline = time.process_time() + seconds
        while time.process_time() < deadline:
            pass
        return "done\n"

    done = []
    with pytest.raises(LimitExceeded, match="CPU time"):
        for text in limited(work, items):
            done.append(text)
    assert done == ["done\n", "done\n"]


def test_no_child_is_left_whatever_happens():
    def work(item: int) -> str:
        if item == 3:
            raise ValueError("three\nlines")
        return str(item)

    before = psutil.Process().children()
    assert list(limited(work, [1, 2])) == ["1", "2"]
    with pytest.raises(Refused, match="three lines"):
        list(limited(work, [1, 2, 3, 4]))
    results = limited(work, [1, 2, 4])
    assert next(results) == "1"
    results.close()
    assert psutil.Process().children() == before


# --- the time


def prompt_at(folder: Path, template: str, now: datetime | None) -> str:
    path = folder / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n')
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return build_prompts(DataConfig(source=str(path)), tokenizer, 1000, 1, now=now)[0][0].text


def test_templates_see_the_given_time(tmp_path):
    midnight = datetime(2026, 12, 31, 23, 59, 59, 999_999)
    template = PLAIN + "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}{% endif %}"
    for now in (midnight, midnight + timedelta(microseconds=1)):
        text = now.strftime("%d %b %Y %H:%M:%S.%f")
        assert prompt_at(tmp_path, template, now) == f"<|user|>a\n<|assistant|>{text}"
    assert prompt_at(tmp_path, DATED, None) != prompt_at(tmp_path, DATED, midnight)
