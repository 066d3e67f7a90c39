"""Text from outside (completions, names, messages) made safe and short to show."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

_HOSTILE_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, bidi and other invisibles, lone surrogates


def visible(text: str, keep_newlines: bool = False) -> str:
    """Escape control, bidirectional and invisible characters, so that `text` cannot control a terminal or page."""
    if text.isprintable() or (keep_newlines and text.replace("\n", "").isprintable()):
        return text
    return "".join(
        char.encode("unicode_escape", "surrogatepass").decode("ascii")
        if unicodedata.category(char) in _HOSTILE_CATEGORIES and not (keep_newlines and char == "\n")
        else char
        for char in text
    )


def shortened(text: str, limit: int = 60) -> str:
    """Return `text`, cut to `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, or the name of its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def first_few(items: Iterable[object], most: int = 3, separator: str = ", ") -> str:
    """Format the first few items and the number of the others."""
    texts = list(map(str, items))
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more
