"""The process that runs reward functions. Its main thread calls them, one request at a time.

Started by `pool.Worker` as `python -c`, not by multiprocessing's spawn: that would import the parent's __main__ again,
which may lack an `if __name__` guard or import torch.

Protocol, pickled over a socket of its own (stdout belongs to the user's functions):
    <- (functions: [(label, name, options)], columns or None)
    -> ("loading", label) for each, then ("ready", None) or ("error", message)
    <- (function index, completions, prompts, columns)
    -> ("scores", [float]) or ("raised", message) or ("error", message); "error" stops the run
"""

from __future__ import annotations

import fcntl
import logging
import math
import numbers
import os
import select
import signal
from multiprocessing.connection import Connection
from typing import Any

from qarl.errors import UserError
from qarl.rewards.loader import RewardFunction, describe, load_function


def main(connection_fd: int, lifeline_fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.set_inheritable(connection_fd, False)
    die_with_parent(lifeline_fd)
    logging.basicConfig(format="%(name)s: %(message)s")
    connection = Connection(connection_fd)
    functions, columns = connection.recv()
    try:
        loaded = []
        for label, name, options in functions:
            connection.send(("loading", label))
            loaded.append(load_function(name, options, columns))
    except UserError as error:
        connection.send(("error", str(error)))
        return
    connection.send(("ready", None))
    while True:
        try:
            index, completions, prompts, columns = connection.recv()
        except EOFError:
            return
        kind, value = run(loaded[index], completions, prompts, columns)
        connection.send((kind, f"reward.functions: `{functions[index][1]}`: {value}" if kind == "error" else value))


def run(
    function: RewardFunction, completions: list[str], prompts: list[str], columns: dict[str, list]
) -> tuple[str, list[float] | str]:
    """Call the function and check what it returns. Any exception of the user's, SystemExit too, becomes a message."""
    try:
        return "scores", checked(function(completions, prompts, columns), len(completions))
    except UserError as error:
        return "error", str(error)
    except BaseException as error:
        return "raised", describe(error)


def checked(scores: Any, count: int) -> list[float]:
    """`count` finite floats. Raises ValueError or TypeError that says what was returned instead.

    A number is a `numbers.Real` or a scalar array or tensor (something with `.item()`).
    """
    try:
        values = list(scores)
    except TypeError:
        raise TypeError(f"returned {type(scores).__name__}, expected a list of {count} numbers") from None
    if len(values) != count:
        raise ValueError(f"returned {len(values)} scores for {count} completions")
    floats = []
    for value in values:
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, numbers.Real):
            raise TypeError(f"returned {value!r:.60} ({type(value).__name__}), expected a number")
        if not math.isfinite(number):
            raise ValueError(f"returned {value!r}, expected a finite number")
        floats.append(float(number))
    return floats


def die_with_parent(lifeline_fd: int) -> None:
    """Have the kernel end this process (SIGIO's default action) when the parent, the only writer of the pipe, is gone.

    Unlike a watching thread this works while a function holds the GIL, and unlike PR_SET_PDEATHSIG it does not fire
    when the parent's thread that started us ends.
    """
    os.set_inheritable(lifeline_fd, False)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline_fd], [], [], 0)[0]:  # it was gone before we asked to be told
        os._exit(1)
