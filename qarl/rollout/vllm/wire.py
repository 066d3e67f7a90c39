"""Messages between the learner's process and the sampler's, over a socket pair that nobody else can reach.

    b"QARL"    bytes of the JSON (4)    bytes of the data (8)    JSON    data

Numbers are big-endian. The JSON is [kind, body]; data are arrays that would be slow as JSON. What arrives is parsed as
data and nothing else: no object is unpickled, and no memory is taken for bytes that have not come. Imports no torch.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from qarl.inputs.files import Unreadable
from qarl.inputs.json import parse_json

MAGIC = b"QARL"
HEADER = struct.Struct(">4sIQ")
JSON_LIMIT = 64 << 20  # bytes: fingerprints of a model's tensors are some 200 each
DATA_LIMIT = 1 << 40  # bytes, where the receiver does not know better
CHUNK = 1 << 20  # bytes read at once


class WireError(Exception):
    """What arrived is no message. One line."""


class WireTimeout(Exception):
    """The other side takes nothing."""


@dataclass(frozen=True)
class Message:
    """kind: what it is. body: a JSON value. data: arrays, as the body says."""

    kind: str
    body: Any = None
    data: bytes | bytearray = b""


class Channel:
    """One end of a socket pair. data_limit: the most data that the next message may have, in bytes."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._buffer = bytearray()
        self._cut_off = False
        self.data_limit = DATA_LIMIT
        self.received = 0  # bytes in all, a sign of life

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Message, limit_s: float | None = None) -> None:
        """Send it whole. limit_s: how long the other side may take no byte; None: for ever.

        Raises WireTimeout, OSError where the other side is gone, WireError after a send that was interrupted.
        """
        if self._cut_off:
            raise WireError("a message to it was cut off")
        text = json.dumps([message.kind, message.body], separators=(",", ":")).encode()
        assert len(text) <= JSON_LIMIT, f"{message.kind}: {len(text)} bytes of JSON"
        self._cut_off = True
        self._send_all(HEADER.pack(MAGIC, len(text), len(message.data)) + text, limit_s)
        self._send_all(message.data, limit_s)
        self._cut_off = False

    def _send_all(self, data: bytes | bytearray, limit_s: float | None) -> None:
        rest = memoryview(data)
        while rest:
            if not select.select([], [self._socket], [], limit_s)[1]:
                raise WireTimeout
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                continue

    def poll(self, limit_s: float | None) -> Message | None:
        """The next message; None where it is not whole within `limit_s` (None: wait for ever).

        Raises EOFError where the other side is gone, WireError for what is no message.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while (message := self._parsed()) is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return None
            try:
                arrived = self._socket.recv(CHUNK)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                arrived = b""
            if not arrived:
                raise EOFError
            self.received += len(arrived)
            self._buffer += arrived
        return message

    def _parsed(self) -> Message | None:
        """The first message of the buffer, which it leaves; None while it is not whole."""
        if not MAGIC.startswith(self._buffer[: len(MAGIC)]):
            raise WireError("bytes that are no message")
        if len(self._buffer) < HEADER.size:
            return None
        _, text_size, data_size = HEADER.unpack_from(self._buffer)
        if text_size > JSON_LIMIT or data_size > self.data_limit:
            raise WireError(f"a message of {text_size:,} and {data_size:,} bytes")
        start, end = HEADER.size + text_size, HEADER.size + text_size + data_size
        if len(self._buffer) < end:
            return None
        text, data = bytes(self._buffer[HEADER.size : start]), self._buffer[start:end]
        del self._buffer[:end]
        try:
            value = parse_json(text, "a message", nonfinite=True)  # a log-prob can be what is no number
        except Unreadable as error:
            raise WireError(str(error)) from None
        if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
            raise WireError("JSON that is no message")
        return Message(value[0], value[1], data)


def channel_pair() -> tuple[Channel, socket.socket]:
    """A channel, and the other end for a child, which inherits its descriptor."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs
