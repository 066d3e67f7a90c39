"""Rows -> prompts: column mapping, template, chat template, tokens, length filter."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qarl.data.columns import listed, map_columns
from qarl.data.conversation import is_conversation, plain_messages, render
from qarl.data.sources import Row, load_rows
from qarl.errors import UserError
from qarl.text import visible
from qarl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qarl.config.data import DataConfig

# The rewards take these names as arguments of their own, so a column of that name cannot be handed to them.
RESERVED_COLUMNS = frozenset({"prompt", "prompts", "completions", "completion_ids"})

PROMPT_CHARS = 10_000_000  # of one prompt: beyond any model's context

_BATCH = 1000  # rows tokenized in one call


@dataclass(frozen=True)
class DropReport:
    """What the length filter did. Lengths are in tokens, over all rows, dropped ones included.

    too_long: over data.max_prompt_length. over_context: within it, but prompt + response exceed the context.
    empty: no token at all.
    """

    rows: int
    kept: int
    too_long: int
    over_context: int
    empty: int
    shortest: int
    longest: int
    max_prompt_length: int
    max_response_length: int
    max_context: int

    @property
    def dropped(self) -> int:
        return self.rows - self.kept

    def summary(self) -> str:
        """One line for the console."""
        head = f"{self.kept} prompts of {self.shortest} to {self.longest} tokens"
        if not self.dropped:
            return head
        return f"{self.kept} of {self.rows} prompts kept, {self.dropped} dropped: {self._reasons()}"

    def _reasons(self) -> str:
        reasons = (
            (self.too_long, f"longer than data.max_prompt_length {self.max_prompt_length}"),
            (
                self.over_context,
                f"with rollout.max_response_length {self.max_response_length} over the context of {self.max_context}",
            ),
            (self.empty, "empty"),
        )
        lengths = f"lengths {self.shortest} to {self.longest} tokens"
        return "; ".join([*(f"{count} {why}" for count, why in reasons if count), lengths])


def build_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_context: int,
    max_response_length: int,
    progress: Callable[[int, int], None] | None = None,
    vocabulary: int | None = None,
) -> tuple[list[Prompt], DropReport]:
    """Load `config.source` and turn its rows into prompts, in the source's order; `Prompt.id` is the row's position.

    A row's columns are the source's own plus the mapped ones (`columns: {prompt: question}` adds `prompt`; see
    `map_columns`). The prompt is the column `prompt`, or `prompt_template` filled with the row's columns. With
    `chat_template` it becomes a conversation (text is one user turn; a list of {role, content} is one already, see
    `plain_messages`; `system_prompt` goes first) rendered by the tokenizer's template, which brings its own special
    tokens; otherwise it is tokenized as text with the tokenizer's default special tokens. All columns but
    `RESERVED_COLUMNS` go into `Prompt.columns`.

    max_context, max_response_length: tokens; rows that cannot fit both are dropped, as are those longer than
    `config.max_prompt_length`. progress(done, total) is called with row counts. vocabulary: tokens that the model's
    embedding has, where it is known.

    Raises UserError: what `load_rows` raises, a missing column, a bad template, a prompt of the wrong type, a tokenizer
    without a chat template, a token that the model lacks, nothing left after the filter.
    """
    if config.chat_template and not tokenizer.chat_template:
        raise UserError(
            "data.chat_template: the model's tokenizer has no chat template; set data.chat_template: false "
            "(and shape the prompt with data.prompt_template)"
        )
    if config.system_prompt is not None and not config.chat_template:
        raise UserError("data.system_prompt: needs data.chat_template: true; put the text into data.prompt_template")
    rows = map_columns(load_rows(config), config)
    texts = [_render(row, index, config, tokenizer) for index, row in enumerate(rows)]

    prompts: list[Prompt] = []
    lengths: list[int] = []
    too_long = over_context = 0
    special = {"add_special_tokens": False} if config.chat_template else {}
    for start in range(0, len(rows), _BATCH):
        batch = texts[start : start + _BATCH]
        for index, token_ids in enumerate(tokenizer(batch, **special)["input_ids"], start=start):
            length = len(token_ids)
            lengths.append(length)
            if vocabulary is not None and max(token_ids, default=0) >= vocabulary:
                token = tokenizer.convert_ids_to_tokens(max(token_ids))
                raise UserError(f"data: row {index}: holds {token!r}, a token that the model lacks; leave it out")
            if length > config.max_prompt_length:
                too_long += 1
            elif length + max_response_length > max_context:
                over_context += 1
            elif length > 0:
                columns = {name: value for name, value in rows[index].items() if name not in RESERVED_COLUMNS}
                prompts.append(Prompt(index, list(token_ids), texts[index], columns))
        if progress is not None:
            progress(len(lengths), len(rows))
    report = DropReport(
        rows=len(rows),
        kept=len(prompts),
        too_long=too_long,
        over_context=over_context,
        empty=len(rows) - len(prompts) - too_long - over_context,
        shortest=min(lengths),
        longest=max(lengths),
        max_prompt_length=config.max_prompt_length,
        max_response_length=max_response_length,
        max_context=max_context,
    )
    if not prompts:
        raise UserError(f"data: no prompt is left of {report.rows} rows in `{config.source}`: {report._reasons()}")
    return prompts, report


def _render(row: Row, index: int, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text to tokenize."""
    place = f"data: row {index}"
    prompt = row["prompt"] if config.prompt_template is None else _fill_template(row, index, config.prompt_template)
    if isinstance(prompt, str):
        if not config.chat_template:
            return _text(prompt, place)
        messages = [{"role": "user", "content": prompt}]
    elif is_conversation(prompt):
        if not config.chat_template:
            raise UserError(f"{place}: `prompt` is a list of messages, which needs data.chat_template: true")
        messages = plain_messages(prompt, place)
    elif prompt is None:
        raise UserError(f"{place}: `prompt` is null, expected text or a list of messages; drop the row")
    else:
        raise UserError(
            f"{place}: `prompt` is {type(prompt).__name__} ({visible(f'{prompt!r:.60}')}), expected text or a list "
            "of {role, content} messages; data.prompt_template: '{prompt}' turns other values into text"
        )
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise UserError(f"data.system_prompt: row {index} brings its own system message; leave one of the two out")
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return _text(render(messages, tokenizer, place), place)


def _fill_template(row: Row, index: int, template: str) -> str:
    parts: list[str] = []
    size = 0
    try:
        for literal, name, spec, conversion in string.Formatter().parse(template):
            parts.append(literal)
            if name is not None:
                value = string.Formatter().convert_field(row[name], conversion)
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


def _text(prompt: str, place: str) -> str:
    """Raises UserError for a prompt that no tokenizer can be given."""
    if len(prompt) > PROMPT_CHARS:
        raise UserError(f"{place}: the prompt has {len(prompt):,} characters, at most {PROMPT_CHARS:,} can be used")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place}: character {error.start} of the prompt is a lone surrogate ({visible(prompt[error.start])}), "
            "which is no character; write it out"
        ) from error
    return prompt
