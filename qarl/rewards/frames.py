"""Messages between the pool and its workers: length-prefixed JSON, never executed.

A frame is a length (8 bytes, big-endian) followed by UTF-8 JSON. Rows may hold values that JSON lacks (tuples, and
mappings with non-string keys as in reasoning-gym): `pack` marks them and `unpack` restores them.
"""

from __future__ import annotations

import json
import struct
from typing import Any

HEADER = struct.Struct(">Q")
REPLY_BYTES = 16 * 2**20  # largest reply: scores of half a million completions

_MARK = "%"  # key of an object that encodes another type


class BadFrame(ValueError):
    """Bytes that are not a valid frame; the message describes them."""


def frame(value: Any) -> bytes:
    """Encode a JSON-able value (see `pack`) as a frame."""
    text = json.dumps(value).encode("ascii")  # escapes lone surrogates, which UTF-8 cannot encode
    return HEADER.pack(len(text)) + text


class Frames:
    """Splits a stream of bytes into frames.

    Args:
        limit: Largest frame in bytes.

    Raises:
        BadFrame: A frame is larger. Only its header has been read.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """Return the text of the next complete frame; None if there is none yet."""
        if len(self._buffer) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self._buffer)
        if self._limit is not None and length > self._limit:
            raise BadFrame(f"announced a reply of {length:,} bytes")
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        text = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return text


def parse_reply(text: bytes) -> tuple[int, str, Any]:
    """Parse a worker's reply into (request number, kind, value).

    Raises:
        BadFrame: It is not a valid reply.
    """
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or absurdly long integers or nesting
        raise BadFrame("sent an invalid reply") from None
    match reply:
        case {"request": int(number), "kind": str(kind), "value": value} if len(reply) == 3:
            return number, kind, value
    raise BadFrame("sent an invalid reply")


def pack(value: Any) -> Any:
    """Convert a value of a row to a JSON-able value.

    Raises:
        TypeError: Rows cannot hold this type (see `data.values`).
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, tuple):
        return {_MARK: "tuple", "items": [pack(item) for item in value]}
    if isinstance(value, dict):
        if _MARK not in value and all(isinstance(key, str) for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {_MARK: "dict", "items": [[pack(key), pack(item)] for key, item in value.items()]}
    raise TypeError(f"{type(value).__name__} cannot be passed to a reward function")


def unpack(text: bytes) -> Any:
    """Invert `pack`, given the JSON text."""
    return json.loads(text, object_hook=_unmarked)


def _unmarked(value: dict[str, Any]) -> Any:
    kind = value.get(_MARK)
    if kind == "tuple":
        return tuple(value["items"])
    return dict(value["items"]) if kind == "dict" else value
