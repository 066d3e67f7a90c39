"""Conversion of row values to JSON values, so that they can be sent to other processes."""

from __future__ import annotations

import base64
import datetime
import decimal
import uuid
from typing import Any

from qarl.inputs.json import DEPTH, INT_DIGITS

Row = dict[str, Any]
"""A row of a data source: column to value."""

_AS_TEXT = (decimal.Decimal, uuid.UUID, datetime.timedelta)
_DATES = (datetime.date, datetime.time)  # datetime.datetime is a date
_LARGEST = 10**INT_DIGITS


class NotPlain(ValueError):
    """A value that a row cannot hold. The message describes it, without its position."""


def plain(value: Any, depth: int = 1) -> Any:
    """Convert `value` to lists, tuples, dicts, text, numbers, booleans and null.

    Dates and times become ISO 8601 text; decimals, time spans and UUIDs become text; bytes become base64 text; arrays
    and scalars of numpy or torch become lists and numbers. Raises NotPlain for other types, too deep nesting, and
    integers with too many digits.
    """
    if depth > DEPTH:
        raise NotPlain(f"is nested deeper than {DEPTH} levels")
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        if abs(value) >= _LARGEST:
            raise NotPlain(f"holds an integer of more than {INT_DIGITS:,} digits; give it as text")
        return int(value)
    if isinstance(value, (list, tuple)):
        items = [plain(item, depth + 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {plain(key, depth + 1): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, _DATES):
        return value.isoformat()
    if isinstance(value, _AS_TEXT):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    if hasattr(value, "tolist"):  # arrays and scalars
        return plain(value.tolist(), depth + 1)
    raise NotPlain(f"holds a value of type {type(value).__name__}, which cannot be passed to reward functions")
