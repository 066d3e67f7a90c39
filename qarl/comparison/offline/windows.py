"""The text for comparing schemes, split into windows of tokens."""

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qarl.errors import UserError
from qarl.inputs.files import Unreadable, decode, read_bytes

BUNDLED = "bundled text"
TEXT_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Source:
    """A text. name: its path, or `BUNDLED`. sha256: digest of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


@dataclass(frozen=True)
class Windows:
    """Windows of tokens.

    Windows are independent. The first tokens of each have little context, so perplexities are higher than with a longer
    context, equally for every scheme.

    Attributes:
        ids: Token ids; all windows have the same length.
        predictions: Number of tokens at the end of each window that are predicted.
    """

    ids: list[list[int]]
    predictions: int


def read_text(path: Path | None) -> Source:
    """Read the user's file, or by default the bundled text of English, mathematics and code.

    Raises:
        UserError: The file is missing, too large, not UTF-8, or empty.
    """
    if path is None:
        data = (resources.files("qarl.comparison.offline") / "default_text.txt").read_bytes()
    else:
        try:
            data = read_bytes(path, TEXT_BYTES, stream=True)
        except Unreadable as error:
            raise UserError(f"--text: {path}: {error.reason}") from error
    text = decode(data, f"--text: {path}")
    if not text.strip():
        raise UserError(f"--text: {path}: is empty; give a text with at least one window of tokens")
    return Source(BUNDLED if path is None else str(path), text, hashlib.sha256(data).hexdigest())


def cut(source: Source, tokenizer: PreTrainedTokenizerBase, length: int, max_tokens: int) -> Windows:
    """Split the first `max_tokens` tokens of the text into windows of `length`.

    Special tokens that the tokenizer prepends do not count. An incomplete last window is dropped.

    Raises:
        UserError: The text is shorter than one window.
    """
    if max_tokens < length:
        raise UserError(f"--max-tokens: {max_tokens} is less than one window of {length} tokens; increase it")
    ids = tokenizer(source.text, add_special_tokens=False, verbose=False)["input_ids"][:max_tokens]
    count = len(ids) // length
    if count == 0:
        raise UserError(
            f"--text: {source.name}: has {len(ids)} tokens, less than one window of {length}; give a longer text"
        )
    start = _start_ids(tokenizer)
    windows = [start + ids[i * length : (i + 1) * length] for i in range(count)]
    # The first token cannot be predicted without a token before it.
    return Windows(windows, length if start else length - 1)


def _start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that the tokenizer prepends to a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    return next((framed[:i] for i in range(len(framed)) if framed[i : i + len(plain)] == plain), [])
