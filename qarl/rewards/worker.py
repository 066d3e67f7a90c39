"""The process that runs reward functions. Its main thread calls them, one request at a time.

Started by `process.Worker` as `python -c` rather than with multiprocessing's spawn, which would import the parent's
__main__ again; that may lack an `if __name__` guard or import torch.

Protocol, in frames (`frames`) over a dedicated socket, because stdout belongs to the user's functions. Every request
has a number, and replies with another number are dropped:
    <- {request, functions: [[label, name, options]], columns}
    -> {request, kind, value}: loading, label for each, then ready, null or error, message
    <- {request, function: its index, completions, prompts, columns}
    -> {request, kind, value}: scores, [float or null] or raised, message or error, message; "error" stops the run
"""

from __future__ import annotations

import itertools
import logging
import math
import numbers
import os
import signal
import socket
from collections.abc import Mapping, Set
from contextlib import suppress
from typing import Any

from qarl.errors import UserError
from qarl.inputs.code import describe
from qarl.rewards.frames import Frames, frame, unpack
from qarl.rewards.loader import RewardFunction, load_function
from qarl.utils.signals import signal_at_end_of_pipe

# For a score, and for a score times its weight. The sum of a million squares of this size fits in float32.
SCORE_LIMIT = 1e9

_MESSAGE_CHARS = 2000


def main(connection_fd: int, lifeline_fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal_at_end_of_pipe(lifeline_fd, signal.SIGKILL)
    die_before_parent()
    logging.basicConfig(format="%(name)s: %(message)s")
    connection = Connection(connection_fd)
    start = connection.receive()
    if start is None:
        return
    functions, columns = start["functions"], start["columns"]
    loaded = []
    for label, name, options in functions:
        connection.send("loading", label)
        try:
            loaded.append(load_function(name, options, columns))
        except UserError as error:
            connection.send("error", str(error))
            return
        except BaseException as error:  # a user's module may raise anything when it is inspected
            connection.send("error", f"reward.functions: `{name}`: cannot be loaded: {describe(error)}")
            return
    connection.send("ready", None)
    while (request := connection.receive()) is not None:
        index = request["function"]
        kind, value = run(loaded[index], request["completions"], request["prompts"], request["columns"])
        connection.send(kind, f"reward.functions: `{functions[index][1]}`: {value}" if kind == "error" else value)


class Connection:
    """The worker's end of the connection.

    It belongs to one process. If a function forks and lets the child return, two processes would answer; the child
    exits when it tries to answer or to read.
    """

    def __init__(self, fd: int) -> None:
        self._owner = os.getpid()
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._frames = Frames()
        self._request = 0
        os.register_at_fork(after_in_child=self._socket.close)  # not called for a fork in C

    def receive(self) -> dict[str, Any] | None:
        """Return the next request, or None once the parent is gone."""
        self._stay_one()
        while (text := self._frames.next()) is None:
            try:
                data = self._socket.recv(2**20)
            except OSError:
                return None
            if not data:
                return None
            self._frames.feed(data)
        request = unpack(text)
        self._request = request["request"]
        return request

    def send(self, kind: str, value: Any) -> None:
        """Answer the latest request."""
        self._stay_one()
        if isinstance(value, str):
            value = value[:_MESSAGE_CHARS]
        try:
            self._socket.sendall(frame({"request": self._request, "kind": kind, "value": value}))
        except OSError:  # the parent is gone, or a function closed the socket
            os._exit(1)

    def _stay_one(self) -> None:
        if os.getpid() != self._owner:
            os._exit(0)


def run(
    function: RewardFunction, completions: list[str], prompts: list[str], columns: dict[str, list]
) -> tuple[str, list[float | None] | str]:
    """Call the function and validate its result. Any exception, even SystemExit, becomes a message."""
    try:
        return "scores", checked(function(completions, prompts, columns), len(completions))
    except UserError as error:
        return "error", str(error)
    except BaseException as error:
        return "raised", describe(error)


def checked(scores: Any, count: int) -> list[float | None]:
    """Validate the result of a reward function.

    Args:
        scores: An ordered iterable (list, tuple, array, generator). An item is None, a `numbers.Real`, or a scalar
            array or tensor (anything with `.item()`).
        count: Number of completions.

    Returns:
        One finite float of at most SCORE_LIMIT per completion, or None for a row that the function skips.

    Raises:
        TypeError, ValueError: The result is invalid; the message says why.
    """
    expected = f"expected a list of {count} numbers"
    if isinstance(scores, (str, bytes, bytearray, Mapping, Set)):  # iterable, but not of scores
        raise TypeError(f"returned {type(scores).__name__}, {expected}")
    try:
        items = iter(scores)
    except TypeError:
        raise TypeError(f"returned {type(scores).__name__}, {expected}") from None
    values = list(itertools.islice(items, count + 1))  # a generator may be infinite
    if len(values) != count:
        size = len(scores) if hasattr(scores, "__len__") else len(values) if len(values) < count else f"over {count}"
        raise ValueError(f"returned {size} scores for {count} completions")
    return [_score(value) for value in values]


def _score(value: Any) -> float | None:
    if value is None:
        return None
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, numbers.Real):
        raise TypeError(f"returned {_shown(value)} ({type(value).__name__}), expected a number or None")
    if abs(float(number)) > SCORE_LIMIT and number not in (math.inf, -math.inf):
        raise ValueError(f"returned {_shown(value)}, which exceeds the limit of {SCORE_LIMIT:.0e}")
    if not math.isfinite(number):
        raise ValueError(f"returned {_shown(value)}, expected a finite number")
    return float(number)


def _shown(value: Any) -> str:
    try:
        return repr(value)[:60]
    except ValueError:  # an integer with more digits than CPython prints
        return (
            f"a number of {value.bit_length():,} bits" if isinstance(value, int) else "a value that cannot be printed"
        )


def die_before_parent() -> None:
    """Make the OOM killer prefer this process and its children over the training process.

    A score of 500 counts as half of the machine's memory: a small worker still survives if another process uses all
    memory.
    """
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
