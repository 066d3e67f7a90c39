import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from qarl.config.data import DataConfig
from qarl.data import build_prompts
from qarl.errors import UserError

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token a white-space separated word; a plain text gets <bos> in front."""
    tokens = Tokenizer(models.WordLevel({"<unk>": 0, "<bos>": 1, "<assistant>": 2}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<bos>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture
def source(tmp_path):
    def write(*rows: dict) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def build(tokenizer, max_context=1000, max_response_length=10, **fields):
    return build_prompts(DataConfig(**fields), tokenizer, max_context, max_response_length)


def words(n: int) -> str:
    return " ".join("w" for _ in range(n))


MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


@pytest.mark.parametrize(
    ("row", "fields", "text", "ids"),
    [
        ({"prompt": "a b"}, {"chat_template": False}, "a b", [1, 0, 0]),  # the tokenizer's special tokens
        ({"prompt": "a b"}, {}, "<user> a b <assistant>", [0, 0, 0, 2]),  # those of the template alone
        ({"prompt": "a"}, {"system_prompt": "be good"}, "<system> be good <user> a <assistant>", None),
        ({"prompt": MESSAGES}, {}, "<system> s <user> u <assistant>", None),
        (
            {"question": "12 + 7", "level": 3},
            {"columns": {"prompt": "question"}, "prompt_template": "{level} : {prompt} = {question} {{}}"},
            "<user> 3 : 12 + 7 = 12 + 7 {} <assistant>",
            None,
        ),
    ],
)
def test_a_row_becomes_the_text_and_tokens_of_its_prompt(tokenizer, source, row, fields, text, ids):
    (prompt,), _ = build(tokenizer, source=source(row), **fields)
    assert prompt.text == text and ids in (None, prompt.token_ids)


def test_a_template_that_drops_the_system_prompt_is_refused(tokenizer, source, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages[-1:] %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match=r"row 0: .*drops or changes the system message"):
        build(tokenizer, source=source({"prompt": "a"}), system_prompt="be good")


@pytest.mark.parametrize(
    ("row", "columns", "kept"),
    [
        ({"question": "How?", "answer": "#### 72"}, {"prompt": "question"}, {"question": "How?", "answer": "#### 72"}),
        ({"prompt": "p", "solution": "5", "answer": "old"}, {"answer": "solution"}, {"solution": "5", "answer": "5"}),
        ({"prompt": "p", "completions": "c", "prompts": "x", "answer": "1"}, {}, {"answer": "1"}),  # rewards' arguments
    ],
)
def test_rewards_get_the_columns_under_their_mapped_names(tokenizer, source, row, columns, kept):
    (prompt,), report = build(tokenizer, source=source(row), columns=columns)
    assert prompt.columns == kept and report.summary().startswith("1 prompts of ")


def test_length_filter_counts_each_reason(tokenizer, source):
    # With <bos>, a text of n words has n + 1 tokens: 3, 6, 7, 9, 1 of them here.
    rows = [{"prompt": text} for text in (words(2), words(5), words(6), words(8), "")]
    prompts, report = build(
        tokenizer,
        source=source(*rows),
        chat_template=False,
        max_prompt_length=7,
        max_context=16,
        max_response_length=10,
    )
    assert [prompt.id for prompt in prompts] == [0, 1, 4]
    assert list(report.reasons.values()) == [1, 1, 0]
    assert report.summary() == (
        "3 of 5 prompts kept, 2 dropped: 1 longer than data.max_prompt_length 7; "
        "1 with rollout.max_response_length 10 over the context of 16; lengths 1 to 9 tokens"
    )


def fails(message: str):
    return pytest.raises(UserError, match=message)


def test_nothing_left_says_why_and_the_lengths(tokenizer, source):
    rows = source({"prompt": words(3)}, {"prompt": words(9)})
    with fails(
        r"no prompt is left of 2 rows.*1 longer than data.max_prompt_length 8; 1 with .*; lengths 4 to 10 tokens"
    ):
        build(tokenizer, source=rows, chat_template=False, max_prompt_length=8, max_context=12)


USER = {"role": "user", "content": "u"}


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([{"question": "q", "answer": "a"}], {}, r"no column `prompt`; it has: question, answer"),
        (
            [{"prompt": "q", "result": "a"}],
            {"columns": {"answer": "solution"}},
            r"data.columns.answer: .* has no column `solution`; it has: prompt, result",
        ),
        (
            [{"prompt": "q"}],
            {"prompt_template": "{question} ="},
            r"data.prompt_template: there is no column 'question'; there are: prompt",
        ),
        ([{"prompt": "q", "x": None}], {"prompt_template": "{prompt} {x}"}, r"row 0: `x` is null .data.prompt_temp"),
        ([{"prompt": "q"}, {"prompt": 5}], {}, r"row 1: `prompt` is int \(5\), expected text or a list"),
        ([{"prompt": [USER]}], {"chat_template": False}, r"row 0: .* list of messages, which needs data.chat_template"),
        (
            [{"prompt": [USER | {"role": "system"}]}],
            {"system_prompt": "s"},
            r"data.system_prompt: row 0 brings its own system message",
        ),
        (
            [{"prompt": [USER | {"role": "tool"}]}],
            {},
            r"row 0: the model's chat template refuses .*: unknown role tool",
        ),
    ],
)
def test_rows_that_make_no_prompt_are_refused_by_place(tokenizer, source, rows, fields, message):
    with fails(message):
        build(tokenizer, source=source(*rows), **fields)


def test_tokenizer_without_chat_template_names_the_fix(source):
    tokens = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    with fails(r"no chat template; set data.chat_template: false"):
        build(PreTrainedTokenizerFast(tokenizer_object=tokens), source=source({"prompt": "q"}))


def test_a_token_that_the_model_lacks_is_refused_by_row(tiny_model, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.add_tokens(["<extra>"])
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "plain"}\n{"prompt": "with <extra>"}\n')
    config = DataConfig(source=str(path), chat_template=False)
    assert len(build_prompts(config, tokenizer, 100, 1, vocabulary=260)[0]) == 2
    with pytest.raises(UserError, match=r"data: row 1: holds '<extra>', a token that the model lacks"):
        build_prompts(config, tokenizer, 100, 1, vocabulary=259)
