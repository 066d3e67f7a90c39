"""Messages between the learner's process and the sampler's, over a socket pair that nobody else can reach.

    b"QARL"    bytes of the JSON (4)    bytes of the data (8)    JSON    data

Numbers are big-endian. The JSON is [kind, body]; the data are arrays that would be slow as JSON. Nothing is unpickled,
and no memory is allocated for bytes that have not arrived. Imports no torch.
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
DATA_LIMIT = 1 << 40  # bytes, unless the receiver sets a limit
CHUNK = 1 << 20  # bytes read at once


class WireError(Exception):
    """The bytes that arrived are not a valid message. One line."""


class WireTimeout(Exception):
    """The other side does not read."""


@dataclass(frozen=True)
class Message:
    """A message. body: A JSON value. data: Arrays that the body describes."""

    kind: str
    body: Any = None
    data: bytes | bytearray = b""


class Channel:
    """One end of a socket pair. data_limit: Most bytes of data that the next message may have."""

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
        """Send a whole message.

        Args:
            limit_s: Seconds for which the other side may read nothing; None: no limit.

        Raises:
            WireTimeout: The limit passed.
            OSError: The other side is gone.
            WireError: An earlier send was interrupted.
        """
        if self._cut_off:
            raise WireError("an earlier message was cut off")
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
        """The next message; None if it is not complete within `limit_s` seconds (None: wait forever).

        Raises:
            EOFError: The other side is gone.
            WireError: The bytes are not a valid message.
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
        """Take the first message out of the buffer; None while it is incomplete."""
        if not MAGIC.startswith(self._buffer[: len(MAGIC)]):
            raise WireError("bytes that are not a message")
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
            value = parse_json(text, "a message", nonfinite=True)  # a log-prob may be NaN or infinite
        except Unreadable as error:
            raise WireError(str(error)) from None
        if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
            raise WireError("JSON that is not a message")
        return Message(value[0], value[1], data)


def channel_pair() -> tuple[Channel, socket.socket]:
    """A channel, and the other end for a child process, which inherits the descriptor."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs
