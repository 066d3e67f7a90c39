"""A row's prompt as a conversation, and its text by the model's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qarl.errors import UserError
from qarl.text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is meant as a list of messages."""
    return isinstance(prompt, list) and len(prompt) > 0 and all(isinstance(m, dict) and "role" in m for m in prompt)


def plain_messages(messages: list[Message], place: str) -> list[Message]:
    """The messages with text as their content, as the templates of text models want it.

    Of a list of parts (`{type: text, text: ...}`, or text) the texts are joined by newlines, as vLLM does. Content that
    is null or missing is left to the template where the message calls tools. A key that is null is left out: tables
    (Parquet) have every key in every message.

    place: the row, for messages. Raises UserError: a role that is no text, content of another type, parts that are
    images or sounds, no content.
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


def render(messages: list[Message], tokenizer: PreTrainedTokenizerBase, place: str) -> str:
    """The conversation as the tokenizer's chat template writes it, up to where the answer begins.

    place: the row. Raises UserError for whatever the template makes of it.
    """
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program that came with the model: it may raise anything
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{place}: the model's chat template refuses the prompt: {visible(said)}") from error


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
