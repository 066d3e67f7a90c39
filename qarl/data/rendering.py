"""Run a function on a list of items in a child process with limits on CPU time and memory per item.

A chat template is a program that comes with the model. Nested loops over `range(100000)`, `10 ** 10 ** 10` or a string
that doubles itself never end, or use all memory. Counting loop steps inside jinja would miss single operations that are
implemented in C, and a signal handler cannot interrupt those either. The kernel can end a process at any point.

The child is forked, because a fork starts in 10 ms and has transformers imported. It only runs pure Python and leaves
with `os._exit`, so thread pools and GPU contexts that it inherits are never used.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Never, TypeVar

from qarl.errors import UserError
from qarl.inputs.paths import reason_of
from qarl.utils.text import one_line

T = TypeVar("T")

CPU_SECONDS = 10.0  # per item
MEMORY_BYTES = 2 * 2**30  # on top of the process's memory at the start
WAIT_SECONDS = 600.0  # wall-clock limit per item, for a child that hangs without using CPU time

_CHUNK = 2**20


class Refused(Exception):
    """`work` raised, or exceeded a limit. The message gives the reason, without the item."""


class LimitExceeded(Refused):
    """`work` exceeded a limit. The message continues "the template ..."."""


def limited(work: Callable[[T], str], items: Sequence[T]) -> Iterator[str]:
    """Yield `work(item)` for each item, in order.

    Raises:
        Refused: `work` raised for the item that would come next; the message is the exception's.
        LimitExceeded: It took more CPU time or memory than one item may.
        UserError: No process can be started.
    """
    if not items:
        return
    try:
        read_end, write_end = os.pipe()
        pid = os.fork()
    except OSError as error:
        raise UserError(
            f"no process can be started to render the chat template: {reason_of(error)}; free memory, or raise the "
            "limits on processes and open files"
        ) from error
    if pid == 0:
        _serve(work, items, write_end)
    os.close(write_end)
    status, left = None, len(items)
    try:
        for line in _lines(read_end):
            result = json.loads(line)
            if "text" not in result:
                raise LimitExceeded(_MEMORY) if result["memory"] else Refused(result["raised"])
            left -= 1
            yield result["text"]
        status = os.waitpid(pid, 0)[1]
    finally:
        os.close(read_end)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if left:
        raise LimitExceeded(_ended(status))


_MEMORY = f"takes more than {MEMORY_BYTES // 2**30} GiB of memory"


def _ended(status: int) -> str:
    """Describe why a child ended before its last item."""
    by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if by == signal.SIGPROF:
        return f"takes more than {CPU_SECONDS:g} s of CPU time"
    if by == signal.SIGKILL or by is None:  # the kernel's out-of-memory killer, or no memory left to report it
        return _MEMORY
    return f"ended its process with signal {by}"


def _lines(fd: int) -> Iterator[bytes]:
    """Yield lines of a pipe until its other end is closed."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    started: list[bytes] = []  # beginning of an incomplete line
    while True:
        if not poll.poll(WAIT_SECONDS * 1000):
            raise LimitExceeded(f"gives no text within {WAIT_SECONDS:g} s")
        chunk = os.read(fd, _CHUNK)
        if not chunk:
            return
        first, *more = chunk.split(b"\n")
        started.append(first)
        for part in more:
            yield b"".join(started)
            started = [part]


def _serve(work: Callable[[T], str], items: Sequence[T], write_end: int) -> Never:
    """The child: write one JSON line per item, and end after the first that fails."""
    try:
        gc.disable()  # a collection could free inherited GPU objects
        logging.disable()  # a handler's lock may be held by a thread that does not exist in the child
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the parent handles it and kills this process
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        _limit_memory()
        for item in items:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            line, good = _line(work, item)
            view = memoryview(line)
            while view:
                view = view[os.write(write_end, view) :]
            if not good:
                break
    finally:
        os._exit(0)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (most, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _line(work: Callable[[T], str], item: T) -> tuple[bytes, bool]:
    """Return the result or error as a line, and whether `work` succeeded."""
    try:
        return json.dumps({"text": work(item)}).encode() + b"\n", True
    except MemoryError:
        said, memory = "", True
    except Exception as error:  # a template may raise anything
        said, memory = one_line(error)[:300], False
    return json.dumps({"raised": said, "memory": memory}).encode() + b"\n", False
