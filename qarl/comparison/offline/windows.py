"""The text that schemes are compared on, cut into windows of tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qarl.errors import UserError
from qarl.inputs.files import Unreadable, decode, read_bytes
from qarl.inputs.paths import user_path

BUNDLED = "bundled text"
TEXT_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Source:
    """A text. name: its path, or `BUNDLED`. sha256: of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


@dataclass(frozen=True)
class Windows:
    """ids: token ids, all windows of the same length. predictions: how many last tokens of each are predicted.

    A window starts anew: its first tokens are predicted from little, so perplexities are higher than with a longer
    context, for every scheme alike.
    """

    ids: list[list[int]]
    predictions: int


def read_text(path: Path | None) -> Source:
    """The user's file, or without one the short English, mathematics and code that comes with qarl.

    Raises UserError: no such file, too large, not UTF-8, nothing in it.
    """
    if path is None:
        data = (resources.files("qarl.comparison.offline") / "default_text.txt").read_bytes()
    else:
        try:
            data = read_bytes(user_path(path, "--text"), TEXT_BYTES, stream=True)
        except Unreadable as error:
            raise UserError(f"--text: {path}: {error.reason}") from error
    text = decode(data, f"--text: {path}")
    if not text.strip():
        raise UserError(f"--text: {path}: is empty; give a text with at least one window of tokens")
    return Source(BUNDLED if path is None else str(path), text, hashlib.sha256(data).hexdigest())


def cut(source: Source, tokenizer: PreTrainedTokenizerBase, length: int, max_tokens: int) -> Windows:
    """The first `max_tokens` tokens of the text in windows of `length`, the special tokens that the tokenizer puts
    before a text not counted; what does not fill a window is left out.

    Raises UserError: less text than one window.
    """
    if max_tokens < length:
        raise UserError(f"--max-tokens: {max_tokens} is less than one window of {length} tokens; raise it")
    ids = tokenizer(source.text, add_special_tokens=False, verbose=False)["input_ids"][:max_tokens]
    count = len(ids) // length
    if count == 0:
        raise UserError(
            f"--text: {source.name}: has {len(ids)} tokens, less than one window of {length}; give a longer text"
        )
    start = _start_ids(tokenizer)
    windows = [start + ids[i * length : (i + 1) * length] for i in range(count)]
    # Without a token before it, the first one has nothing to be predicted from.
    return Windows(windows, length if start else length - 1)


def _start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Special tokens that the tokenizer puts before a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    return next((framed[:i] for i in range(len(framed)) if framed[i : i + len(plain)] == plain), [])
