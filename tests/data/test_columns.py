"""Columns inside columns, by paths; and the fingerprint of what the rewards are given."""

import json
from pathlib import Path

import pytest

from qarl.config.data import DataConfig
from qarl.data import PromptStream, build_prompts
from qarl.data.columns import NoField, field_of
from qarl.errors import UserError

ROW = {
    "a": {"b": {"c": 1}, "b.c": 2, "d": [{"e": 3}, {"e": 4}], "null": None, "": 5},
    "a.b": {"c": 6, "x": 7},
    "dotted.name.here": 8,
    "text": "t",
}
FIELDS = {
    "a": ROW["a"],
    "a.b": ROW["a.b"],
    "a.b.c": 6,
    "a.d.1.e": 4,
    "a.null": None,
    "dotted.name.here": 8,
    "text": "t",
}
NO_FIELDS = {
    "z": " has no column `z`; it has: a, a.b, dotted.name.here, text",
    "a.z": ": `a` has no field `z`; it has: b, b.c, d, null",
    "a.d.2.e": ": `a.d` is a list of 2 items and has no `2`",
    "a.d.-1": ": `a.d` is a list of 2 items and has no `-1`",
    "a.null.x": ": `a.null` is null, and has no field `x`",
    "text.x": r": `text` is str \('t'\), and has no field `x`",
    "dotted.name": " has no column `dotted`",
}


@pytest.mark.parametrize("path", FIELDS)
def test_a_path_leads_to_a_field_and_a_name_with_dots_comes_first(path):
    assert field_of(ROW, path) == FIELDS[path]


@pytest.mark.parametrize("path", NO_FIELDS, ids=range(len(NO_FIELDS)))
def test_a_path_that_leads_nowhere_says_what_is_there(path):
    with pytest.raises(NoField, match=NO_FIELDS[path]):
        field_of(ROW, path)


def test_a_row_without_the_field_is_named(tmp_path, tokenizer):
    rows = [{"prompt": "p", "reward_model": {"ground_truth": str(i), "style": "rule"}} for i in range(5)]
    del rows[3]["reward_model"]["ground_truth"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(source=str(path), columns={"answer": "reward_model.ground_truth"}, chat_template=False)
    with pytest.raises(UserError) as caught:
        build_prompts(config, tokenizer, 1000, 1)
    assert str(caught.value) == (
        f"data.columns.answer: row 3 of `{path}`: `reward_model` has no field `ground_truth`; it has: style"
    )
    prompts, _ = build_prompts(config.model_copy(update={"max_rows": 3}), tokenizer, 1000, 1)
    assert [prompt.columns["answer"] for prompt in prompts] == ["0", "1", "2"]


def test_a_changed_answer_is_another_fingerprint(tmp_path, tokenizer):
    path: Path = tmp_path / "a.jsonl"

    def stream(answer) -> PromptStream:
        rows = [{"prompt": f"p{i}", "answer": "1" if i else answer} for i in range(3)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        prompts, _ = build_prompts(DataConfig(source=str(path)), tokenizer, 1000, 1)
        return PromptStream(prompts, 0, True)

    state = stream("5").state()
    stream("5").load_state(state)
    for other in ("6", 5, None):
        with pytest.raises(UserError, match=r"their other columns \(answers\) are not"):
            stream(other).load_state(state)
    del state["columns_fingerprint"]  # of a checkpoint that an earlier version wrote
    stream("6").load_state(state)
