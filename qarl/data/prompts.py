"""Build prompts from rows: column mapping, template, chat template, tokenization, length filter."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from qarl.config.data import RESERVED_COLUMNS
from qarl.data.choices import letter_choices
from qarl.data.columns import listed, map_columns
from qarl.data.conversation import (
    Arguments,
    ChatTemplate,
    Message,
    encode,
    is_conversation,
    plain_messages,
    require_known_tokens,
    row_arguments,
)
from qarl.data.sources import load_rows
from qarl.data.values import Row
from qarl.errors import UserError
from qarl.types import Prompt
from qarl.utils.text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qarl.config.data import DataConfig

PROMPT_CHARS = 10_000_000  # limit per prompt, beyond any model's context

EMPTY = "empty"  # reason for dropping a row without tokens
_BATCH = 1000  # rows tokenized in one call


@dataclass(frozen=True)
class DropReport:
    """Result of the length filter.

    Attributes:
        rows: Rows of the source.
        reasons: Number of dropped rows per reason.
        shortest, longest: Prompt lengths in tokens over all rows, including dropped ones.
    """

    rows: int
    reasons: dict[str, int]
    shortest: int
    longest: int

    @property
    def dropped(self) -> int:
        return sum(self.reasons.values())

    def summary(self) -> str:
        """One line for the console."""
        kept = self.rows - self.dropped
        if not self.dropped:
            return f"{kept} prompts of {self.shortest} to {self.longest} tokens"
        return f"{kept} of {self.rows} prompts kept, {self.dropped} dropped: {self.why()}"

    def why(self) -> str:
        lengths = f"lengths {self.shortest} to {self.longest} tokens"
        return "; ".join([*(f"{count} {reason}" for reason, count in self.reasons.items() if count), lengths])


def build_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_context: int,
    max_response_length: int,
    vocabulary: int | None = None,
    now: datetime | None = None,
) -> tuple[list[Prompt], DropReport]:
    """Load `config.source` and turn its rows into prompts, in the order of the source.

    The columns of a row are those of the source, the mapped ones (`columns: {prompt: question}` adds `prompt`; see
    `map_columns`), and those of `letter_choices`. The prompt is the column `prompt`, or `prompt_template` filled with
    the row's columns. With `chat_template` it becomes a conversation, which `ChatTemplate` renders: text becomes one
    user message, a list of {role, content} is a conversation already (see `plain_messages`), and `system_prompt` goes
    first. For special tokens see `encode`.

    Args:
        config: The `data` section.
        tokenizer: The model's tokenizer.
        max_context: Maximum tokens of a prompt plus its response. A prompt is dropped if `max_response_length` more
            tokens would exceed this, or if it exceeds `config.max_prompt_length`.
        max_response_length: Maximum tokens of a response.
        vocabulary: Rows of the model's embedding; None: unknown.
        now: The time that the chat template sees. Default: the current time.

    Returns:
        The prompts, and a report of dropped rows. `Prompt.id` is the row's position; `Prompt.columns` has all columns
        except `RESERVED_COLUMNS`.

    Raises:
        UserError: As for `load_rows`; or a column is missing, the template is invalid, a prompt has the wrong type, the
            tokenizer has no chat template, the model lacks a token, or no prompt is left after the filter.
    """
    rows, places = mapped_rows(config, tokenizer)
    texts = _texts(rows, places, config, tokenizer, now)

    too_long = f"longer than data.max_prompt_length {config.max_prompt_length}"
    over_context = f"with rollout.max_response_length {max_response_length} over the context of {max_context}"
    reasons = {too_long: 0, over_context: 0, EMPTY: 0}
    prompts: list[Prompt] = []
    lengths: list[int] = []
    for start in range(0, len(rows), _BATCH):
        batch = texts[start : start + _BATCH]
        for index, token_ids in enumerate(encode(tokenizer, batch, config.chat_template), start=start):
            length = len(token_ids)
            lengths.append(length)
            require_known_tokens(token_ids, vocabulary, tokenizer, places[index])
            if length > config.max_prompt_length:
                reasons[too_long] += 1
            elif length + max_response_length > max_context:
                reasons[over_context] += 1
            elif length == 0:
                reasons[EMPTY] += 1
            else:
                columns = {name: value for name, value in rows[index].items() if name not in RESERVED_COLUMNS}
                prompts.append(Prompt(index, token_ids, texts[index], columns))
    report = DropReport(len(rows), reasons, min(lengths), max(lengths))
    if not prompts:
        raise UserError(f"data: no prompt is left of {report.rows} rows in `{config.source}`: {report.why()}")
    return prompts, report


def mapped_rows(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, needs_prompt: bool = True, key: str = "data"
) -> tuple[list[Row], list[str]]:
    """Return the rows with mapped columns and lettered choices, and the name of each row in error messages.

    Raises UserError as `build_prompts`.
    """
    _require_chat_template(config, tokenizer)
    rows = map_columns(load_rows(config), config, needs_prompt)
    if config.choices is not None:
        rows = letter_choices(rows, config)
    return rows, [f"{key}: row {index}" for index in range(len(rows))]


def _require_chat_template(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if the section uses a chat template that the tokenizer does not have."""
    if config.chat_template and not tokenizer.chat_template:
        raise UserError(
            "data.chat_template: the model's tokenizer has no chat template; set data.chat_template: false "
            "(and shape the prompt with data.prompt_template)"
        )
    if config.system_prompt is not None and not config.chat_template:
        raise UserError("data.system_prompt: needs data.chat_template: true; put the text into data.prompt_template")
    if config.chat_template_kwargs and not config.chat_template:
        raise UserError("data.chat_template_kwargs: needs data.chat_template: true; leave them out")


def _texts(
    rows: list[Row], places: list[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, now: datetime | None
) -> list[str]:
    """Return the texts to tokenize. places: prefix of error messages, per row."""
    given = [given_prompt(row, index, places[index], config) for index, row in enumerate(rows)]
    if config.chat_template:
        conversations = [conversation_of(prompt, index, places[index], config) for index, prompt in enumerate(given)]
        template = ChatTemplate(tokenizer, config.chat_template_kwargs, now or datetime.now())
        given = template.render(conversations, places, arguments_of(rows, places, config, tokenizer.chat_template))
    return [require_encodable(prompt, place) for prompt, place in zip(given, places, strict=True)]


def given_prompt(row: Row, index: int, place: str, config: DataConfig) -> Any:
    """Return the row's prompt before the chat template: text or a list of messages."""
    prompt = row["prompt"] if config.prompt_template is None else _fill_template(row, index, config.prompt_template)
    if isinstance(prompt, str):
        return prompt
    if is_conversation(prompt):
        if not config.chat_template:
            raise UserError(f"{place}: `prompt` is a list of messages, which needs data.chat_template: true")
        return prompt
    if prompt is None:
        raise UserError(f"{place}: `prompt` is null, expected text or a list of messages; drop the row")
    raise UserError(
        f"{place}: `prompt` is {type(prompt).__name__} ({visible(f'{prompt!r:.60}')}), expected text or a list "
        "of {role, content} messages; data.prompt_template: '{prompt}' turns other values into text"
    )


def conversation_of(prompt: str | list[Message], index: int, place: str, config: DataConfig) -> list[Message]:
    """Return the messages of a prompt, with the system prompt of the section."""
    if isinstance(prompt, str):
        messages: list[Message] = [{"role": "user", "content": prompt}]
    else:
        messages = plain_messages(prompt, place)
    if config.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise UserError(f"data.system_prompt: row {index} brings its own system message; leave one of the two out")
    return [{"role": "system", "content": config.system_prompt}, *messages]


def arguments_of(rows: list[Row], places: list[str], config: DataConfig, template: Any) -> list[Arguments]:
    """Return the arguments of the chat template per row, without tools if `data.prompt_template` writes them itself."""
    named = re.search(r"\{tools\b", config.prompt_template or "") is None
    uses_tools = re.search(r"\btools\b", str(template)) is not None
    return [
        row_arguments(row.get("tools") if named else None, row.get("chat_template_kwargs"), place, uses_tools)
        for row, place in zip(rows, places, strict=True)
    ]


def _fill_template(row: Row, index: int, template: str) -> str:
    parts: list[str] = []
    size = 0
    try:
        for literal, name, spec, conversion in string.Formatter().parse(template):
            parts.append(literal)
            if name is not None:
                value = string.Formatter().convert_field(row[name], conversion)
                if value is None:
                    raise UserError(f"data: row {index}: `{name}` is null (data.prompt_template); drop the row")
                parts.append(format(value, spec or ""))
                size += len(parts[-1])
                if size > PROMPT_CHARS:
                    raise ValueError(f"the prompt would have more than {PROMPT_CHARS:,} characters")
    except KeyError as error:
        raise UserError(f"data.prompt_template: there is no column {error}; there are: {listed(row)}") from error
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise UserError(
            f"data.prompt_template: row {index}: {visible(str(error)) or type(error).__name__} "
            "(a field is {column}; write {{ or }} for a brace)"
        ) from error
    return "".join(parts)


def require_encodable(prompt: str, place: str) -> str:
    """Return the text. Raises UserError if it is too long or cannot be encoded as UTF-8."""
    if len(prompt) > PROMPT_CHARS:
        raise UserError(f"{place}: the prompt has {len(prompt):,} characters, at most {PROMPT_CHARS:,} can be used")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place}: character {error.start} of the prompt is a lone surrogate ({visible(prompt[error.start])}), "
            "which is not a character; remove it"
        ) from error
    return prompt
