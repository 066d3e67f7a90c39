"""`build_examples`: which tokens of a row are prompt, response and trained on."""

import json

import pytest
from templates import CHATML, PLAIN, THINKING

from qarl.config.data import DataConfig
from qarl.data import build_prompts
from qarl.data.examples import build_examples
from qarl.errors import UserError

EOS = 1
TURNS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "6"},
]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
NO_SYSTEM = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")


@pytest.fixture
def section(tokenizer, tmp_path, monkeypatch):
    """section(rows, template, **data keys) -> `DataConfig` of a file with these rows."""

    def make(rows, template=CHATML, **keys):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DataConfig(source=str(file), **keys)

    return make


@pytest.fixture
def build(tokenizer, section):
    """build(rows, template, context, longest, stops, **data keys) -> (prompts, report)."""

    def make(rows, template=CHATML, context=400, longest=200, stops=(EOS,), **keys):
        return build_examples(section(rows, template, **keys), tokenizer, context, longest, frozenset(stops))

    return make


def parts(tokenizer, prompt):
    """(prompt text, response text, trained text)."""
    given = prompt.response
    written = given.written or [True] * len(given.token_ids)
    trained = [token for token, own in zip(given.token_ids, written, strict=True) if own]
    return tuple(tokenizer.decode(ids) for ids in (prompt.token_ids, given.token_ids, trained))


def test_messages_train_every_turn_of_the_assistant(build, tokenizer):
    prompts, report = build([{"messages": TURNS}])
    before, after, trained = parts(tokenizer, prompts[0])
    assert before.endswith("user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert before + after == tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert trained == "4<|im_end|>\n6<|im_end|>\n"
    assert report.tokens == len(trained) and report.kept == 1


def test_a_conversation_that_repeats_its_prompt_is_prompted_once(build, tokenizer):
    for keys in {}, {"system_prompt": "S"}:
        (one,), _ = build([{"prompt": "2+2?", "messages": TURNS}], **keys)
        (other,), _ = build([{"messages": TURNS}], **keys)
        assert parts(tokenizer, one) == parts(tokenizer, other)
    (one,), _ = build([{"prompt": TURNS[:3], "messages": [{"role": "system", "content": "S"}, *TURNS]}])
    assert "S" in parts(tokenizer, one)[0] and parts(tokenizer, one)[2] == "6<|im_end|>\n"


def test_tools_of_a_row_reach_the_template(build, section, tokenizer):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": None, "b": 1}}}]
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    shown = '[{"type": "function", "function": {"name": "add", "parameters": {"b": 1}}}]<|im_start|>system'
    for value in tools, json.dumps(tools):
        (example, plain), _ = build([{"messages": TURNS, "tools": value}, {"messages": TURNS, "tools": []}], template)
        assert parts(tokenizer, example)[0].startswith(shown) and parts(tokenizer, plain)[0].startswith("<|im_start|>")
        (prompt,), _ = build_prompts(section([{"prompt": "2+2?", "tools": value}], template), tokenizer, 400, 200)
        assert prompt.token_ids == example.token_ids
    (other,), _ = build([{"prompt": TURNS[:1], "completion": "4", "tools": value}], template, prompt_template="{tools}")
    assert parts(tokenizer, other)[0].startswith("<|im_start|>")
    with pytest.raises(UserError, match=r"data: row 0: .*does not use `tools`"):
        build([{"messages": TURNS, "tools": tools}], CHATML)


def test_a_row_has_arguments_of_the_template(build, section, tokenizer):
    row = {"prompt": "2+2?", "completion": "4", "chat_template_kwargs": {"enable_thinking": False, "other": None}}
    for keys in {}, {"chat_template_kwargs": {"enable_thinking": True}}:
        (example,), _ = build([row], THINKING, **keys)
        (prompt,), _ = build_prompts(section([row], THINKING, **keys), tokenizer, 400, 200)
        assert (
            parts(tokenizer, example)[0].endswith("<think>\n\n</think>\n\n") and prompt.token_ids == example.token_ids
        )
    with pytest.raises(UserError, match=r"data: row 0: `chat_template_kwargs.messages` is set by qarl"):
        build([row | {"chat_template_kwargs": {"messages": 1}}], THINKING)


def test_a_turn_ends_with_its_last_stop_token(build, tokenizer):
    """The newline that the template writes after it is context, and nothing after the last turn is kept."""
    prompts, _ = build([{"messages": TURNS}], stops=[tokenizer.convert_tokens_to_ids(">")])
    _, after, trained = parts(tokenizer, prompts[0])
    assert trained == "4<|im_end|>6<|im_end|>" and after.endswith("6<|im_end|>")


def test_prompts_are_those_of_sampling(build, section, tokenizer):
    rows = [{"prompt": "2+2?", "completion": "4"}, {"prompt": "3+3?", "completion": "6"}]
    prompts, _ = build(rows, PLAIN, system_prompt="Be brief.")
    sampled, _ = build_prompts(section(rows, PLAIN, system_prompt="Be brief."), tokenizer, 400, 200)
    assert [p.token_ids for p in prompts] == [p.token_ids for p in sampled]
    assert [parts(tokenizer, p)[1] for p in prompts] == ["4\n", "6\n"]


def test_without_a_chat_template_the_completion_follows_the_prompt_and_ends(build, tokenizer):
    row = {"prompt": "2+2=", "answer": "4"}
    prompts, _ = build([row], chat_template=False, response="answer")
    assert tokenizer.decode(prompts[0].token_ids) == "2+2="
    assert prompts[0].response.token_ids == [*tokenizer("4")["input_ids"], EOS]
    assert prompts[0].response.written is None


def test_plain_text_trains_every_token_but_the_first(build, tokenizer):
    prompts, report = build([{"text": "abc"}])
    assert prompts[0].token_ids + prompts[0].response.token_ids == [*tokenizer("abc")["input_ids"], EOS]
    assert len(prompts[0].token_ids) == 1 and report.tokens == 3


def test_a_template_that_drops_earlier_reasoning_leaves_one_trained_turn(build, tokenizer):
    turns = [*TURNS[:1], {"role": "assistant", "content": "<think>\neasy\n</think>\n\n4"}, *TURNS[2:]]
    prompts, _ = build([{"messages": turns}], THINKING)
    before, after, trained = parts(tokenizer, prompts[0])
    assert before + after == tokenizer.apply_chat_template(turns, tokenize=False)
    assert "easy" not in before and trained == "<think>\n\n</think>\n\n6<|im_end|>\n"


def test_long_responses_are_cut_and_long_prompts_dropped(build, tokenizer):
    rows = [
        {"prompt": "1", "completion": "x" * 30},
        {"prompt": "y" * 60, "completion": "2"},
        {"prompt": "3", "completion": "4"},
    ]
    prompts, report = build(rows, longest=10, chat_template=False, max_prompt_length=40)
    assert [p.id for p in prompts] == [0, 2]
    assert [len(p.response.token_ids) for p in prompts] == [10, 2]
    assert [p.response.complete for p in prompts] == [False, True]
    assert "1 cut" in report.summary() and "1 dropped" in report.summary()
    prompts, _ = build(rows[:1], context=8, chat_template=False)
    assert len(prompts[0].response.token_ids) == 7  # what the context has room for


def test_responses_that_do_not_end_are_reported(build, tokenizer):
    """A template without the model's end-of-sequence token teaches a policy that never stops."""
    rows = [{"prompt": "1", "completion": "2"}, {"prompt": "1", "completion": "x" * 30}]
    assert build(rows, CHATML, longest=20)[1].endless == 1
    assert "1 do not end with an end-of-sequence token" in build(rows, CHATML, longest=20)[1].summary()
    assert build(rows, CHATML, stops=[tokenizer.convert_tokens_to_ids(">")])[1].endless == 0
    assert build(rows, chat_template=False)[1].endless == 0


@pytest.mark.parametrize(
    ("row", "keys", "text"),
    [
        ({"prompt": "a", "answer": "b"}, {}, "none of the columns completion, response, messages, text"),
        ({"prompt": "a", "completion": "b"}, {"response": "gold"}, "no column `gold`"),
        ({"prompt": "a", "completion": ""}, {}, "row 0: `completion` is empty"),
        ({"messages": TURNS[:1]}, {}, "no message of the assistant"),
        ({"messages": TURNS[1:]}, {}, "row 0: the conversation begins with the assistant"),
        ({"prompt": TURNS[:2], "completion": "5"}, {}, "row 0: the prompt ends with a message of the assistant"),
        ({"prompt": "1+1?", "messages": TURNS}, {}, "row 0: `messages` begins with user, but not with the prompt"),
        ({"messages": [TURNS[0], CALL, TURNS[3]]}, {}, "row 0: a message without content calls tools"),
        ({"messages": TURNS}, {"template": NO_SYSTEM, "system_prompt": "S"}, "row 0: .*drops .* system message"),
    ],
)
def test_rows_without_a_usable_response_are_refused_in_one_line(build, row, keys, text):
    with pytest.raises(UserError, match=text) as caught:
        build([row], **keys)
    assert "\n" not in str(caught.value)
