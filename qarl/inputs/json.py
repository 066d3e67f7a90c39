"""Parsing untrusted JSON with limits on depth and numbers, and conversion of values to strict JSON."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.inputs.files import TEXT_BYTES, Unreadable, decode, read_text
from qarl.utils.text import shortened, visible

DEPTH = 64  # nesting of lists and objects
INT_DIGITS = 4000  # below Python's limit for parsing integers, 4,300

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE = re.compile("[\ud800-\udfff]")


class _Refused(ValueError):
    pass


def parse_json(
    text: str | bytes, place: str, *, big_integers: bool = False, nonfinite: bool = False, surrogates: bool = False
) -> Any:
    """Parse a JSON text.

    Args:
        text: The text, or its UTF-8 bytes.
        place: Source of the text (a file, or a line of it), for messages.
        big_integers: Allow integers of up to INT_DIGITS digits; otherwise they must fit 64 bits.
        nonfinite: Allow NaN and Infinity, which strict JSON does not have.
        surrogates: Allow lone surrogates, for text that is only shown through `qarl.utils.text.visible`.

    Raises:
        Unreadable: Not UTF-8, not JSON, deeper than DEPTH, a number too large, or text with lone surrogates.
    """
    if isinstance(text, bytes):
        text = decode(text, place)

    def integer(digits: str) -> int:
        if len(digits) > (INT_DIGITS if big_integers else 20):
            raise _Refused(f"the integer {digits[:20]}... of {len(digits):,} characters is too large")
        value = int(digits)
        if not big_integers and not -(2**63) <= value < 2**63:
            raise _Refused(f"the integer {digits} does not fit 64 bits")
        return value

    def real(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            raise _Refused(f"the number {digits[:20]} is too large for a float")
        return value

    def constant(name: str) -> float:
        if not nonfinite:
            raise _Refused(f"holds {name}, which is not a JSON number")
        return float(name)

    try:
        value = json.loads(text, parse_int=integer, parse_float=real, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise Unreadable(place, f"not valid JSON (line {error.lineno} column {error.colno}: {error.msg})") from None
    except _Refused as error:
        raise Unreadable(place, str(error)) from None
    except RecursionError:
        raise Unreadable(place, f"nested deeper than {DEPTH} levels") from None
    # Skip the walk over the values if the text cannot contain what it looks for.
    if text.count("[") + text.count("{") > DEPTH or _ESCAPED_SURROGATE.search(text) or _LONE.search(text):
        _walk(value, place, surrogates)
    return value


def read_json(path: Path, *, limit: int = TEXT_BYTES, **options: bool) -> Any:
    """Read a JSON file. limit: Maximum bytes. options: See `parse_json`. Raises NoSuchFile, Unreadable."""
    return parse_json(read_text(path, limit), str(path), **options)


def read_json_object(path: Path, *, limit: int = TEXT_BYTES, **options: bool) -> dict[str, Any]:
    """Like `read_json`, for a file that must hold an object."""
    value = read_json(path, limit=limit, **options)
    if not isinstance(value, dict):
        raise Unreadable(str(path), f"holds {json_kind(value)}, expected an object")
    return value


def body_digest(contents: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an object without its own `sha256`."""
    body = {key: value for key, value in contents.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def json_kind(value: Any) -> str:
    """Return a readable name of a JSON value's type."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def strict(value: Any) -> Any:
    """Convert a value to strict JSON: NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(child) for child in value]
    return value


def _walk(value: Any, place: str, surrogates: bool, depth: int = 1, path: str = "") -> None:
    """Raise Unreadable for too deep nesting, and unless allowed for lone surrogates, which UTF-8 cannot encode."""
    if isinstance(value, str) and not surrogates and _LONE.search(value):
        where = f" at {visible(path)}" if path else ""
        raise Unreadable(place, f"holds a lone surrogate{where}, which is not a character; write the character itself")
    if isinstance(value, (dict, list)):
        if depth > DEPTH:
            raise Unreadable(place, f"nested deeper than {DEPTH} levels")
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            here = f"{path}.{key}"[:60].lstrip(".")
            _walk(key, place, surrogates, depth, here)
            _walk(child, place, surrogates, depth + 1, here)


def short_json(value: Any) -> str:
    """Format a value as JSON for a message, on one line and cut to 60 characters."""
    return shortened(visible(json.dumps(value, ensure_ascii=False, default=str)))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys, in order. A list is one value."""
    if not isinstance(value, dict) or (not value and prefix):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, child in value.items():
        flat |= flatten(child, f"{prefix}.{key}" if prefix else str(key))
    return flat
