"""Build prompts with given responses from rows, for supervised training and for distillation without sampling.

Three kinds of rows are accepted, as in TRL:

    prompt + completion    both text or messages; the completion may repeat the prompt; the prompt is built as for RL
    messages               a conversation; every turn of the assistant is trained on
    text                   plain text; every token but the first is trained on
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from qarl.data.columns import listed
from qarl.data.conversation import (
    ChatTemplate,
    Message,
    encode,
    is_conversation,
    plain_messages,
    require_known_tokens,
)
from qarl.data.prompts import arguments_of, conversation_of, given_prompt, mapped_rows, require_encodable
from qarl.data.values import Row
from qarl.errors import UserError
from qarl.types import GivenResponse, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qarl.config.data import DataConfig

COLUMNS = ("completion", "response", "messages", "text")
"""Columns that are taken as the response if `data.response` is null, in this order."""
_BATCH = 1000  # rows tokenized in one call


@dataclass
class ExampleReport:
    """How many rows of the source became examples.

    Attributes:
        rows: Rows of the source.
        kept: Examples.
        tokens: Response tokens that have a loss.
        cut: Responses that were cut to the maximum length.
        endless: Responses that were not cut, but do not end with a stop token.
        dropped: Number of dropped rows per reason.
    """

    rows: int
    kept: int = 0
    tokens: int = 0
    cut: int = 0
    endless: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """One line for the console."""
        parts = [f"{self.kept} examples with {self.tokens:,} tokens to learn"]
        if self.cut:
            parts.append(f"{self.cut} cut to rollout.max_response_length or the context")
        if self.endless:
            parts.append(
                f"{self.endless} do not end with an end-of-sequence token of the model, so it does not learn to stop"
            )
        parts += [f"{count} dropped: {reason}" for reason, count in self.dropped.items()]
        return "; ".join(parts)


class Tokens(NamedTuple):
    """Token ids of a whole example, and which of them are trained on."""

    ids: list[int]
    trained: list[bool]


def build_examples(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_context: int,
    max_response_length: int,
    stops: Set[int],
    vocabulary: int | None = None,
    now: datetime | None = None,
    key: str = "data",
) -> tuple[list[Prompt], ExampleReport]:
    """Load `config.source` and turn its rows into prompts with responses, in the order of the source.

    The response begins with the first trained token. It is cut to `max_response_length`, and to what the context has
    room for. A trained turn ends with its last token in `stops`; what the chat template writes after it is context.
    Without a chat template, the tokenizer's end-of-sequence token is appended.

    Args:
        config: The `data` section.
        tokenizer: The model's tokenizer.
        max_context: Maximum tokens of a prompt plus its response.
        max_response_length: Maximum tokens of a response.
        stops: Ids of the tokens that end a response.
        vocabulary: Rows of the model's embedding; None: unknown.
        now: The time that the chat template sees. Default: the current time.
        key: Name of the section in errors.

    Returns:
        The prompts, and a report of cut and dropped rows.

    Raises:
        UserError: As `build_prompts`, or a row has no response, or no row is left.
    """
    rows, places = mapped_rows(config, tokenizer, needs_prompt=False, key=key)
    column = _response_column(config, rows[0], key)
    report, prompts = ExampleReport(len(rows)), list[Prompt]()
    for index, tokens in enumerate(_tokenized(rows, places, column, config, tokenizer, stops, now)):
        require_known_tokens(tokens.ids, vocabulary, tokenizer, places[index])
        example = _example(index, tokens, config.max_prompt_length, max_context, max_response_length, report)
        if example is not None:
            prompts.append(example)
            given = example.response
            report.endless += given is not None and given.complete and given.token_ids[-1] not in stops
    report.kept = len(prompts)
    if not prompts:
        raise UserError(f"{key}: no example is left of {report.rows} rows in `{config.source}`: {report.summary()}")
    return prompts, report


def _response_column(config: DataConfig, row: Row, key: str) -> str:
    column = config.response or next((name for name in COLUMNS if name in row), None)
    if column is None or column not in row:
        missing = f"no column `{column}`" if column else f"none of the columns {', '.join(COLUMNS)}"
        raise UserError(
            f"{key}.response: `{config.source}` has {missing}; it has: {listed(row)}; name the column of the responses"
        )
    return column


def _example(
    index: int, tokens: Tokens, max_prompt: int, max_context: int, max_response: int, report: ExampleReport
) -> Prompt | None:
    """Split an example into prompt and response, and cut the response; None if nothing is left to learn."""
    start = tokens.trained.index(True) if True in tokens.trained else 0
    if start == 0:
        report.dropped["nothing to learn"] += 1
        return None
    if start > max_prompt or start >= max_context:
        report.dropped[f"prompt longer than data.max_prompt_length {max_prompt} or the context of {max_context}"] += 1
        return None
    whole, room = len(tokens.ids) - start, min(max_response, max_context - start)
    ids, trained = tokens.ids[start : start + room], tokens.trained[start : start + room]
    report.cut += whole > room
    report.tokens += sum(trained)
    response = GivenResponse(ids, None if all(trained) else trained, whole <= room)
    return Prompt(index, tokens.ids[:start], "", response=response)


def _tokenized(
    rows: list[Row],
    places: list[str],
    column: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    stops: Set[int],
    now: datetime | None,
) -> Iterator[Tokens]:
    """Yield the tokens of each row, in order."""
    prompted = "prompt" in rows[0] or config.prompt_template is not None
    template = ChatTemplate(tokenizer, config.chat_template_kwargs, now or datetime.now())
    for start in range(0, len(rows), _BATCH):
        part, at = rows[start : start + _BATCH], places[start : start + _BATCH]
        if not prompted and not is_conversation(part[0][column]):
            texts = [_text(row[column], place, column) for row, place in zip(part, at, strict=True)]
            yield from _plain_texts(texts, tokenizer)
        elif config.chat_template:
            conversations = [
                _conversation(row, start + i, place, column, config, tokenizer.chat_template)
                for i, (row, place) in enumerate(zip(part, at, strict=True))
            ]
            arguments = arguments_of(part, at, config, tokenizer.chat_template)
            yield from _chats(template.split(conversations, at, arguments), tokenizer, stops, at)
        elif not prompted:
            raise UserError(f"{at[0]}: `{column}` is a list of messages, which needs data.chat_template: true")
        else:
            pairs = [
                (given_prompt(row, start + i, place, config), _text(row[column], place, column))
                for i, (row, place) in enumerate(zip(part, at, strict=True))
            ]
            yield from _pairs(pairs, tokenizer, stops)


def _text(value: Any, place: str, column: str) -> str:
    if not isinstance(value, str) or not value:
        kind = "empty" if value == "" else f"{type(value).__name__}"
        raise UserError(f"{place}: `{column}` is {kind}, expected text; drop the row, or name another data.response")
    return require_encodable(value, place)


def _conversation(
    row: Row, index: int, place: str, column: str, config: DataConfig, template: Any
) -> tuple[list[Message], int]:
    """The messages of a row, and the index from which turns of the assistant are trained on."""
    value = row[column]
    if "prompt" in row or config.prompt_template is not None:
        before = conversation_of(given_prompt(row, index, place, config), index, place, config)
        if isinstance(value, str):
            after: list[Message] = [{"role": "assistant", "content": _text(value, place, column)}]
        elif is_conversation(value):
            after = plain_messages(value, place)
        else:
            raise UserError(f"{place}: `{column}` is {type(value).__name__}, expected text or a list of messages")
        if before[-1]["role"] == after[0]["role"] == "assistant" and not before[-1].get("tool_calls"):
            raise UserError(
                f"{place}: the prompt ends with a message of the assistant, which a sampled response would continue; "
                f"move its text into `{column}`"
            )
        messages, first = [*before, *after], len(before)
        if after[0]["role"] in ("system", "user"):  # the whole conversation, as in UltraChat
            system = before[:1] if before[0]["role"] == "system" and after[0]["role"] == "user" else []
            messages = [*system, *after]
            first += after[0]["role"] == "system" and before[0]["role"] != "system"
            if messages[first - len(before) : first] != before:
                raise UserError(
                    f"{place}: `{column}` begins with {after[0]['role']}, but not with the prompt; give the messages "
                    "after the prompt, or the whole conversation"
                )
    else:
        if not is_conversation(value):
            raise UserError(
                f"{place}: `{column}` is {type(value).__name__}, expected a list of {{role, content}} messages"
            )
        messages, first = conversation_of(value, index, place, config), 0
    if not any(message["role"] == "assistant" for message in messages[first:]):
        raise UserError(f"{place}: `{column}` has no message of the assistant to learn from; drop the row")
    if messages[0]["role"] == "assistant":
        raise UserError(f"{place}: the conversation begins with the assistant, without a prompt; drop that turn")
    if "tool_calls" not in str(template) and any(message["content"] is None for message in messages):
        raise UserError(
            f"{place}: a message without content calls tools, but the model's chat template does not render tool "
            "calls; drop the row, or use a model whose template has tool_calls"
        )
    return messages, first


def _chats(
    conversations: list[list[tuple[str, bool]]], tokenizer: PreTrainedTokenizerBase, stops: Set[int], places: list[str]
) -> Iterator[Tokens]:
    """Tokenize rendered conversations as a whole. A token belongs to the piece in which it begins."""
    if not tokenizer.is_fast:
        raise UserError(
            "model.path: the tokenizer does not report the offsets of its tokens (it has no tokenizer.json); convert "
            "it to a fast tokenizer"
        )
    texts = [
        require_encodable("".join(text for text, _ in pieces), place)
        for pieces, place in zip(conversations, places, strict=True)
    ]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    for pieces, ids, offsets in zip(conversations, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        trained, position, begin = [False] * len(ids), 0, 0
        for text, learns in pieces:
            end, own = begin + len(text), list[int]()
            while position < len(ids) and offsets[position][0] < end:
                own.append(position)
                position += 1
            begin = end
            if learns:
                last = max((place for place in own if ids[place] in stops), default=own[-1] if own else -1)
                for place in own:
                    trained[place] = place <= last
        last = max((place for place, learns in enumerate(trained) if learns), default=-1)
        yield Tokens(list(ids[: last + 1]), trained[: last + 1])


def _pairs(pairs: list[tuple[Any, str]], tokenizer: PreTrainedTokenizerBase, stops: Set[int]) -> Iterator[Tokens]:
    """Tokenize prompts and completions without a chat template, the prompt as for sampling."""
    prompts = encode(tokenizer, [prompt for prompt, _ in pairs], templated=False)
    whole = encode(tokenizer, [prompt + completion for prompt, completion in pairs], templated=False)
    alone = tokenizer([completion for _, completion in pairs], add_special_tokens=False, verbose=False)["input_ids"]
    for prompt, both, completion in zip(prompts, whole, alone, strict=True):
        # Tokens may merge across the boundary. The sampler continues the prompt's own tokens, so training does too.
        after = both[len(prompt) :] if both[: len(prompt)] == prompt else list(completion)
        yield _ended(prompt, after, tokenizer, stops)


def _plain_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Tokens]:
    """Tokenize texts. The first token is the prompt, because it cannot be predicted."""
    for ids in encode(tokenizer, texts, templated=False):
        yield _ended(ids[:1], ids[1:], tokenizer, frozenset())


def _ended(prompt: list[int], after: list[int], tokenizer: PreTrainedTokenizerBase, stops: Set[int]) -> Tokens:
    """Append the end-of-sequence token, if the tokenizer has one and the text does not end with a stop token."""
    end = tokenizer.eos_token_id
    if end is not None and not (after and after[-1] in stops | {end}):
        after = [*after, end]
    return Tokens([*prompt, *after], [False] * len(prompt) + [True] * len(after))
