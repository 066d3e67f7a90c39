"""Renders a row's conversation with the model's chat template, and tokenizes the result."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from qarl.config.data import template_argument_faults
from qarl.data.rendering import LimitExceeded, Refused, limited
from qarl.errors import UserError
from qarl.utils.text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Conversation = tuple[list[Message], int]
"""Messages, and the index from which the assistant's turns are trained on."""
Arguments = dict[str, Any]
"""Arguments of the chat template for one conversation, such as `tools`."""
T = TypeVar("T")


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, list) and len(prompt) > 0 and all(isinstance(m, dict) and "role" in m for m in prompt)


def plain_messages(messages: list[Message], place: str) -> list[Message]:
    """Convert the content of messages to text, which the templates of text models expect.

    The texts of a list of parts (`{type: text, text: ...}`, or text) are joined by newlines, as in vLLM. If the message
    calls tools, null or missing content is left to the template. Keys with null are dropped, because tables (Parquet)
    have every key in every message.

    Args:
        messages: A conversation.
        place: The row, for error messages.

    Raises:
        UserError: A role is not text, content is of another type or missing, or a part is an image or sound.
    """
    plain = []
    for index, message in enumerate(messages):
        here = f"{place}: message {index} of `prompt`"
        if not isinstance(message["role"], str):
            raise UserError(f"{here}: its role is {_shown(message['role'])}, expected text such as user")
        message = {key: value for key, value in message.items() if value is not None}
        content = message.get("content")
        if content is None:
            if not message.get("tool_calls"):
                raise UserError(f"{here} ({visible(message['role'])}) has no content (null); give it text")
            message["content"] = None
        elif not isinstance(content, str):
            message["content"] = _joined(content, here)
        plain.append(message)
    return plain


def row_arguments(tools: Any, kwargs: Any, place: str, uses_tools: bool) -> Arguments:
    """Return the arguments of the chat template that a row gives in the columns `tools` and `chat_template_kwargs`.

    Both may be JSON text. Values of other types are ignored. Keys with null are dropped, see `plain_messages`.

    Args:
        tools, kwargs: Values of the two columns.
        place: The row, for error messages.
        uses_tools: Whether the chat template uses `tools`.

    Raises:
        UserError: A name cannot be an argument, or the chat template does not use `tools`.
    """
    tools, kwargs = _from_json(tools), _from_json(kwargs)
    arguments: Arguments = _without_null(kwargs) if isinstance(kwargs, dict) else {}
    for fault in template_argument_faults(arguments):
        raise UserError(f"{place}: `{visible('.'.join(map(str, fault.key)))}` {fault.text}")
    if isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools):
        if not uses_tools:
            raise UserError(
                f"{place}: has tools, but the model's chat template does not use `tools`; use a model whose template "
                "does, or rename the column"
            )
        arguments["tools"] = _without_null(tools)
    return arguments


def _from_json(value: Any) -> Any:
    with suppress(TypeError, ValueError, RecursionError):  # not text, or not JSON
        return json.loads(value)
    return value


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer and its arguments.

    Attributes:
        tokenizer: The tokenizer.
        kwargs: `data.chat_template_kwargs`.
        now: The time that `strftime_now` formats, local and without a time zone, as in transformers.
        refusal, remedy: Parts of error messages: what failed, and how to do without the template.
    """

    tokenizer: PreTrainedTokenizerBase
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    now: datetime = field(default_factory=datetime.now)
    refusal: str = "the model's chat template refuses the prompt"
    remedy: str = "set data.chat_template: false"

    def render(
        self,
        conversations: Sequence[list[Message]],
        places: Sequence[str],
        arguments: Sequence[Arguments] | None = None,
    ) -> list[str]:
        """Render conversations up to the position at which the response begins.

        A final assistant message is continued: its text ends the prompt, as with `continue_final_message` of
        transformers. If its text is empty or only whitespace, there is nothing to continue, and a new assistant turn
        begins. A new turn also begins after a final message that calls tools, because that message is complete.

        Args:
            conversations: Lists of messages, see `plain_messages`.
            places: Prefix of error messages, per conversation.
            arguments: Per conversation, see `row_arguments`. They take precedence over `kwargs`. None: none has any.

        Raises:
            UserError: The template raises, exceeds the limits of `qarl.data.rendering`, does not use one of the
                arguments, or drops or changes the message to continue.
        """
        items = list(zip(conversations, arguments or [{}] * len(conversations), strict=True))
        return self._limited(self._render, items, places)

    def split(
        self, conversations: Sequence[Conversation], places: Sequence[str], arguments: Sequence[Arguments]
    ) -> list[list[tuple[str, bool]]]:
        """Render whole conversations, split into trained assistant turns and the text between them.

        A turn begins after the template's generation prompt and includes what the template writes after the message,
        such as the end-of-sequence token. Templates that change earlier turns when later ones follow (Qwen3 removes
        their reasoning) leave one trained turn, the last.

        Args:
            conversations: Each with at least one trained turn of the assistant.
            places, arguments: Per conversation, see `render`.

        Returns:
            Per conversation (text, whether it is a trained turn); the texts joined are the rendered conversation.

        Raises:
            UserError: As `render`, or the template does not begin the last turn with its generation prompt.
        """
        return [
            [(text, bool(trained)) for text, trained in json.loads(line)]
            for line in self._limited(self._split, list(zip(conversations, arguments, strict=True)), places)
        ]

    def _limited(self, work: Callable[[T], str], items: Sequence[T], places: Sequence[str]) -> list[str]:
        """Run `work` on each item in the limited child process."""
        self._require_used()
        texts: list[str] = []
        try:
            for text in limited(work, items):
                texts.append(text)
        except LimitExceeded as error:
            raise UserError(
                f"{places[len(texts)]}: the chat template of {self._name} {error} for one prompt; repair the template, "
                f"or {self.remedy}"
            ) from error
        except Refused as error:
            raise UserError(f"{places[len(texts)]}: {self.refusal}: {visible(str(error))}") from error
        return texts

    def _render(self, item: tuple[list[Message], Arguments]) -> str:
        """Render one conversation. Runs in the limited child process."""
        messages, arguments = item
        final = messages[-1] if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls") else None
        if final is not None and not final["content"].strip():
            final, messages = None, messages[:-1]
        try:
            text = self._whole(messages, arguments, opens=final is None, continues=final is not None)
        except ValueError as error:
            if not str(error).startswith("continue_final_message"):  # transformers does not find the message's text
                raise
            raise ValueError(_CHANGED) from error
        # transformers looks for the text anywhere: an earlier message with the same text hides that it was dropped.
        if final is not None and not text.rstrip().endswith(final["content"].strip()):
            raise ValueError(_CHANGED)
        _require_system(messages, text)
        return text

    def _split(self, item: tuple[Conversation, Arguments]) -> str:
        """`split` of one conversation, as JSON. Runs in the limited child process."""
        (messages, first), arguments = item
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        pieces: list[tuple[str, bool]] = []
        done = ""
        for turn in turns:
            before = self._whole(messages[:turn], arguments, opens=True)
            after = self._whole(messages[: turn + 1], arguments)
            if not after.startswith(before):
                if turn == turns[-1]:
                    raise ValueError(_OTHER_BEGINNING)
                continue
            if not before.startswith(done):
                pieces, done = [], ""
            pieces += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        _require_system(messages[: turns[-1] + 1], done)
        return json.dumps(pieces)

    def _whole(
        self, messages: list[Message], arguments: Arguments, opens: bool = False, continues: bool = False
    ) -> str:
        """Render messages.

        opens: Append the generation prompt. continues: Cut after the text of the last message.
        """
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=opens,
                continue_final_message=continues,
                strftime_now=lambda format: self.now.strftime(format),
                **{**self.kwargs, **arguments},
            )
        )

    def _require_used(self) -> None:
        template = str(self.tokenizer.chat_template)  # a template, or a dict of templates by name
        for name in self.kwargs:
            if not re.search(rf"\b{name}\b", template):
                raise UserError(
                    f"data.chat_template_kwargs.{name}: the chat template of {self._name} does not use it; correct "
                    "the name, or leave it out"
                )

    @property
    def _name(self) -> str:
        return visible(str(self.tokenizer.name_or_path)) or "the tokenizer"


def _require_system(messages: Sequence[Message], text: str) -> None:
    """Raise ValueError if the rendered text lacks a system message, as with templates without that role."""
    for message in messages:
        if message["role"] == "system" and (message["content"] or "").strip() not in text:
            raise ValueError(
                "it drops or changes the system message; leave that out, or put its text into the user's message"
            )


def uses_time(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template reads the current time, as that of Llama 3.2 does for its date."""
    return "strftime_now" in str(tokenizer.chat_template)


_OTHER_BEGINNING = (
    "it begins the assistant's message differently than its generation prompt, so that a model trained on the message "
    "would not see what it is prompted with; set data.chat_template_kwargs to match, or repair the template"
)
_CHANGED = (
    "it drops or changes part of the last message (assistant), so that it cannot be continued; shorten that message, "
    "or end the prompt with a user message"
)


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], templated: bool) -> list[list[int]]:
    """Tokenize prompts.

    Args:
        tokenizer: The model's tokenizer.
        texts: The prompts.
        templated: Whether a chat template rendered the texts. It has written all special tokens. Other texts get the
            special tokens that the tokenizer prepends (BOS), but not those that it appends (EOS, SEP), because the
            model would treat the prompt as complete.
    """
    if templated:
        return [list(ids) for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
    encoded = tokenizer(texts, return_special_tokens_mask=True, verbose=False)
    masks = encoded["special_tokens_mask"]  # 1: added by the tokenizer, and not in the text
    if (mask := next((mask for mask in masks if 0 in mask), None)) is None:  # empty texts do not tell BOS from EOS
        mask = tokenizer("a", return_special_tokens_mask=True, verbose=False)["special_tokens_mask"]
    added = next((count for count, special in enumerate(reversed(mask)) if not special), len(mask))
    return [list(ids[: len(ids) - added]) for ids in encoded["input_ids"]]


def require_known_tokens(
    ids: Sequence[int], vocabulary: int | None, tokenizer: PreTrainedTokenizerBase, place: str
) -> None:
    """Raise UserError for a token beyond the model's embedding. vocabulary: Rows of the embedding; None: unknown."""
    if vocabulary is not None and max(ids, default=0) >= vocabulary:
        token = tokenizer.convert_ids_to_tokens(max(ids))
        raise UserError(f"{place}: holds {token!r}, a token that the model lacks; leave it out")


def _joined(content: Any, here: str) -> str:
    if not isinstance(content, list):
        raise UserError(f"{here}: its content is {_shown(content)}, expected text or a list of parts")
    texts = []
    for part in content:
        if isinstance(part, dict) and part.get("type", "text") == "text":
            part = part.get("text")
        if not isinstance(part, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise UserError(f"{here}: its content has a part that is {_shown(kind)}; only text parts can be used")
        texts.append(part)
    return "\n".join(texts)


def _shown(value: Any) -> str:
    return "null" if value is None else visible(f"{type(value).__name__} {value!r:.40}")
