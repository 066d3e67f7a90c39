"""What crosses between the pool and its workers: JSON texts behind their length, and nothing that is executed.

A frame is eight bytes, the length of what follows as a big-endian integer, and then UTF-8 JSON. Rows may hold what JSON
cannot say (tuples, and objects whose keys are no text, as reasoning-gym's do): `pack` marks them, `unpack` undoes it.
"""

from __future__ import annotations

import json
import struct
from typing import Any

HEADER = struct.Struct(">Q")
REPLY_BYTES = 16 * 2**20  # of one reply: scores of half a million completions

_MARK = "%"  # key of an object that stands for something else


class BadFrame(ValueError):
    """Bytes that are not a valid frame. The message describes them."""


def frame(value: Any) -> bytes:
    """A value that JSON can say (see `pack`), ready to be sent."""
    text = json.dumps(value).encode("ascii")  # escapes lone surrogates, which UTF-8 could not take
    return HEADER.pack(len(text)) + text


class Frames:
    """Cuts a stream of bytes into the texts of its frames.

    limit: bytes of one text. Raises BadFrame for a longer one, of which no more than the header is read.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The text of the next frame; None until it is there as a whole."""
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
    """(request number, kind, value) of a worker's reply. Raises BadFrame if it is anything else."""
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, an integer of 5,000 digits, 10,000 brackets
        raise BadFrame("sent something that is no reply") from None
    match reply:
        case {"request": int(number), "kind": str(kind), "value": value} if len(reply) == 3:
            return number, kind, value
    raise BadFrame("sent something that is no reply")


def pack(value: Any) -> Any:
    """A value of a row as what JSON can say. Raises TypeError for one that no row can hold (see `data.values`)."""
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
    raise TypeError(f"{type(value).__name__} cannot be handed to a reward")


def unpack(text: bytes) -> Any:
    """Inverse of `pack`, from the JSON text."""
    return json.loads(text, object_hook=_unmarked)


def _unmarked(value: dict[str, Any]) -> Any:
    kind = value.get(_MARK)
    if kind == "tuple":
        return tuple(value["items"])
    return dict(value["items"]) if kind == "dict" else value
