"""Messages between the learner's process and the sampler's: pickles over a socket pair that no other process can reach.

Format: 8 bytes with the size of the pickle (big-endian), then a pickle of (kind, body).

`multiprocessing.Connection` is not used because it blocks in the middle of a message. A `Channel` counts the bytes that
have arrived, which distinguishes a sampler that hangs from one whose long answer is still arriving.

Both ends run the same code, so a body needs no schema. Unpickling only creates objects of `CLASSES` and calls nothing
else, so an answer of the sampler's process cannot run code in the learner's.
"""

from __future__ import annotations

import io
import math
import pickle
import socket
import struct
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from qarl_kernels.truncation import Truncation

from qarl.errors import UserError
from qarl.rollout.engine import SamplingParams
from qarl.rollout.vllm.settings import AsyncSettings, Group, Request, Response, SamplerSettings
from qarl.weight_sync.fingerprints import Fingerprint, PublishError
from qarl.weight_sync.transport import CudaHandle, Entry, Payload, ReceiverPlan
from qarl.weight_sync.update import WeightUpdate

CLASSES: dict[tuple[str, str], type] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        *(SamplerSettings, type(Path()), Fingerprint, ReceiverPlan),  # start
        *(WeightUpdate, Payload, Entry, CudaHandle),  # publish
        *(Request, SamplingParams, Truncation, Response),  # generate
        *(AsyncSettings, Group),  # asynchronous rollouts
    )
}
HEADER = struct.Struct(">Q")
LIMIT = 1 << 40  # bytes of a pickle; printed text that is misread as a header gives a larger number
CHUNK = 1 << 20  # bytes per read


class ChannelError(Exception):
    """The received bytes are not a message, or an earlier message was sent only in part. The text is one line."""


class Channel:
    """One end of a socket pair.

    Attributes:
        received: Number of bytes received so far.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()
        self._cut_off = False
        self.received = 0

    def close(self) -> None:
        self._socket.close()

    def send(self, kind: str, body: Any = None, limit_s: float | None = None) -> None:
        """Send a whole message.

        Args:
            kind: Kind of the message.
            body: Objects of builtin types and of `CLASSES`.
            limit_s: Seconds within which the other side must have read it. Default: no limit.

        Raises:
            TimeoutError: The limit passed.
            OSError: The other side is gone.
            ChannelError: An earlier send was interrupted.
        """
        if self._cut_off:
            raise ChannelError("an earlier message was cut off")
        data = pickle.dumps((kind, body), pickle.HIGHEST_PROTOCOL)
        self._cut_off = True
        self._socket.settimeout(limit_s)
        self._socket.sendall(HEADER.pack(len(data)) + data)
        self._cut_off = False

    def poll(self, limit_s: float | None) -> tuple[str, Any] | None:
        """Return the next message; None if it is not complete within `limit_s` seconds (None: wait forever).

        Raises:
            EOFError: The other side is gone.
            ChannelError: The bytes are not a valid message.
        """
        deadline = time.monotonic() + (math.inf if limit_s is None else limit_s)
        while (message := self._parsed()) is None:
            left = max(0.0, deadline - time.monotonic())
            self._socket.settimeout(None if limit_s is None else left)
            try:
                arrived = self._socket.recv(CHUNK)
            except (TimeoutError, BlockingIOError):
                return None
            except ConnectionResetError:
                arrived = b""
            if not arrived:
                raise EOFError
            self.received += len(arrived)
            self._buffer += arrived
        return message

    def _parsed(self) -> tuple[str, Any] | None:
        """Remove the first message from the buffer and return it; None if it is incomplete."""
        if len(self._buffer) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._buffer)
        if size > LIMIT:
            raise ChannelError("bytes that are not a message")
        end = HEADER.size + size
        if len(self._buffer) < end:
            return None
        data = io.BytesIO(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        try:
            kind, body = _Unpickler(data).load()
        except Exception as error:  # whatever unpickling raises
            raise ChannelError(f"a message that cannot be read: {type(error).__name__}: {str(error)[:200]!r}") from None
        return kind, body


class _Unpickler(pickle.Unpickler):
    """Creates objects of builtin types and of `CLASSES`."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is not a class of a message")
        return CLASSES[module, name]


def channel_pair() -> tuple[Channel, socket.socket]:
    """Return a channel and the socket of its other end, whose descriptor a child process inherits."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs


def root_cause(error: BaseException) -> str:
    """Return the message of the first UserError in a chain of errors, else the first line of the original error."""
    while not isinstance(error, UserError):
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is None:
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        error = cause
    return str(error)


def send_failure(channel: Channel, error: Exception) -> None:
    """Send an error to the learner, and write its traceback to the log."""
    with suppress(OSError):  # a full disk
        traceback.print_exception(error)
    channel.send("failed", (root_cause(error), isinstance(error, PublishError)))
