"""A prompt whose messages end with an assistant message is continued, and no prompt ends with a token of its end."""

import random

import pytest
from templates import CHATML, HEADERS, THINKING
from tiny_models import byte_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from qarl.config.data import DataConfig
from qarl.data import build_prompts
from qarl.data.conversation import ChatTemplate, encode, plain_messages
from qarl.errors import UserError

PIECES = [
    *["Let me think.", " <think>", "<think>\n", "a", "</think>", "\n\n", " ", "5 + 7", "\n", "é"],
    *["<|assistant|", "0"],
]


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def conversation(rng: random.Random) -> list[dict]:
    """Any order of roles, consecutive ones of one role and tools among them; contents as text or as parts."""

    def message(role: str) -> dict:
        content = "".join(rng.choices(PIECES, k=rng.randint(1, 4)))
        parts = [{"type": "text", "text": content}] if rng.random() < 0.3 else content
        return {"role": role, "content": parts}

    first = [message("system")] if rng.random() < 0.3 else []
    return [*first, *(message(rng.choice(["user", "assistant", "tool"])) for _ in range(rng.randint(1, 4)))]


def rendered(template: ChatTemplate, messages: list[dict]) -> str | None:
    """The prompt; None if it is refused, in one line that names the row."""
    try:
        return template.render([plain_messages(messages, "data: row 7")], ["data: row 7"])[0]
    except UserError as error:
        assert str(error).startswith("data: row 7: ") and str(error).isprintable(), error
        assert "drops or changes part of the last message" in str(error)
        return None


@pytest.mark.parametrize("name", HEADERS)
def test_a_final_assistant_message_is_continued(name):
    source, header = HEADERS[name]
    tokenizer, rng, kept = tokenizer_with(source), random.Random(name), 0
    template = ChatTemplate(tokenizer)
    for _ in range(6):
        messages = [*conversation(rng), {"role": "assistant", "content": "".join(rng.choices(PIECES, k=3)) + "a"}]
        if (text := rendered(template, messages)) is None:
            continue
        kept += 1
        plain = plain_messages(messages, "")
        assert text.rstrip().endswith(plain[-1]["content"].strip())
        assert text.count(header) == sum(m["role"] == "assistant" for m in plain)
        clock = {"strftime_now": template.now.strftime}
        assert text == tokenizer.apply_chat_template(plain, tokenize=False, continue_final_message=True, **clock)
    assert kept >= 2


@pytest.mark.parametrize("name", ["chatml", "dated"])
def test_a_final_message_of_another_kind_or_without_text_begins_a_turn(name):
    tokenizer, rng = tokenizer_with(HEADERS[name][0]), random.Random(name)
    template = ChatTemplate(tokenizer)
    for blank in ("", " \t\n"):
        messages = [*conversation(rng), {"role": "user", "content": "Go on."}]
        closed = plain_messages(messages, "")
        clock = {"strftime_now": template.now.strftime}
        expected = tokenizer.apply_chat_template(closed, tokenize=False, add_generation_prompt=True, **clock)
        assert rendered(template, messages) == expected
        assert rendered(template, [*messages, {"role": "assistant", "content": blank}]) == expected


# --- special tokens

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<x>": 3, "a": 4, "b": 5}
TEXTS = ["a", "a b", "a </s>", "</s>", "<s> a", "", "<x>", "b <x> a </s> </s>"]


def processed(processor: processors.PostProcessor | None) -> PreTrainedTokenizerFast:
    tokens = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        tokens.post_processor = processor
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = "{{ bos_token }} {% for m in messages %}{{ m.content }} {% endfor %}"
    return fast


def added(before: list[str], after: list[str]) -> processors.PostProcessor:
    single = " ".join([*before, "$A", *after])
    return processors.TemplateProcessing(
        single=single, special_tokens=[(name, WORDS[name]) for name in {*before, *after}]
    )


@pytest.fixture(scope="module")
def adding() -> dict[str, tuple[PreTrainedTokenizerFast, list[int]]]:
    """Tokenizers, and what each adds in front."""
    found = {
        f"{' '.join(before)} A {' '.join(after)}": (processed(added(before, after)), [WORDS[name] for name in before])
        for before, after in (([], []), (["<s>"], ["</s>"]), (["<s>", "<x>"], ["<x>", "</s>"]))
    }
    pieces = [processors.ByteLevel(), added(["<s>"], ["</s>"])]
    found |= {"none": (processed(None), []), "sequence": (processed(processors.Sequence(pieces)), [1])}
    return found


def test_a_plain_prompt_has_what_the_tokenizer_adds_in_front_and_nothing_behind(adding):
    for name, (tokenizer, front) in adding.items():
        bare = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
        assert encode(tokenizer, TEXTS, templated=False) == [[*front, *ids] for ids in bare], name
        assert encode(tokenizer, ["", ""], templated=False) == [front, front], name


# --- arguments of the template


def test_arguments_reach_the_template(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n')
    config = DataConfig(source=str(path), chat_template_kwargs={"enable_thinking": False})
    prompt = build_prompts(config, tokenizer_with(THINKING), 1000, 1)[0][0]
    assert prompt.text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    with pytest.raises(UserError, match=r"data.chat_template_kwargs.enable_thinking: the chat template of .* not use"):
        build_prompts(config, tokenizer_with(CHATML), 1000, 1)
