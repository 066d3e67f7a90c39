"""The parent's handle of one reward worker process; the process itself is `worker.main`."""

from __future__ import annotations

import itertools
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from qarl.distributed.rank_info import child_environment
from qarl.errors import UserError
from qarl.rewards.frames import REPLY_BYTES, BadFrame, Frames, frame, parse_reply
from qarl.rewards.log import Output, RewardLog
from qarl.rewards.resident import ends, resident_bytes
from qarl.rewards.worker import SCORE_LIMIT
from qarl.utils.text import visible

START_LIMIT_S = 120.0  # interpreter, and whatever the user's modules import
END_LIMIT_S = 30.0  # for one that runs nothing any more to be gone
LOOK_S = 0.1  # between two looks at a worker's memory, and at whether it lives

_READ_BYTES = 2**16
_READS = 64  # from one descriptor at a time, so that a flood keeps nobody waiting
_STALE_LIMIT = 1000  # replies of other numbers in one call: more is a flood

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from qarl.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)

_numbers = itertools.count(1)  # of requests, of all workers of this process


@dataclass(frozen=True)
class Task:
    """One call: a function (its index) on a contiguous part of the batch."""

    function: int
    indices: range


@dataclass(frozen=True)
class Report:
    """How a task ended.

    Attributes:
        task: The task.
        outcome: One score per completion (None: the function skipped the row), or what went wrong.
        hung: Whether it gave no answer within its time limit.
        stale: Number of replies to other calls that were dropped meanwhile.
    """

    task: Task
    outcome: list[float | None] | str
    hung: bool = False
    stale: int = 0


class Worker:
    """Starting until `ready` is received, then idle, or busy with `task` until `deadline` (time.monotonic).

    It leads a session of its own: the terminal's Ctrl-C does not reach it, and `kill` also ends what a reward function
    started. Whatever comes from it is suspect: it is read without ever waiting, as data of at most `REPLY_BYTES`.
    """

    def __init__(
        self,
        functions: list[tuple[str, str, dict[str, Any]]],
        columns: list[str] | None,
        log: RewardLog,
        memory_gib: float | None,
    ) -> None:
        self._socket, child = socket.socketpair()
        self._socket.setblocking(False)
        self._printed, prints = os.pipe()
        life, self._lifeline = os.pipe()  # never written, and its own: a pipe has one process that is told of its end
        os.set_blocking(self._printed, False)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, json.dumps(sys.path), str(child.fileno()), str(life)],
                stdin=subprocess.DEVNULL,
                stdout=prints,
                stderr=prints,
                pass_fds=[child.fileno(), life],
                start_new_session=True,
                # A function that calls init_process_group or a hub client must not take itself for a rank of the run.
                env=child_environment(os.environ),
            )
        except BaseException:
            self._close()
            raise
        finally:
            child.close()
            os.close(prints)
            os.close(life)
        self.task: Task | None = None
        self.starting = True
        self.started = time.monotonic()
        self.deadline = self.started + START_LIMIT_S
        self._limit_s = START_LIMIT_S
        self._memory_gib = memory_gib
        self._next_look = self.started + LOOK_S
        self._output = Output(log)
        self._output_open = True
        self._loading = functions[0][0]
        self._killed = False
        self._stale = 0
        self._frames = Frames(REPLY_BYTES)
        self._outgoing: bytes | memoryview = b""
        self._request({"functions": functions, "columns": columns})

    @property
    def gone(self) -> bool:
        """Killed, or dead with nothing under way. What died while it starts or is busy is not gone before `attend` has
        said what became of it."""
        return self._killed or (not (self.starting or self.task) and self._process.poll() is not None)

    def send(self, task: Task, arguments: dict[str, Any], limit_s: float) -> None:
        """Hand a task to an idle worker. arguments: completions, prompts, columns."""
        self.task = task
        self._limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self._output.begin()
        self._request({"function": task.function, **arguments})

    def watch(self, poll: select.poll) -> None:
        """Have `poll` return when there is something to do for `attend`."""
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        if self._output_open:
            poll.register(self._printed, select.POLLIN)

    def attend(self) -> Report | None:
        """Write and read what can be without waiting. Returns how its task ended; None while it runs or starts.

        Raises UserError if it cannot load the functions, or a function found a fault of the user's.
        """
        try:
            self._write()
            alive = self._process.poll() is None  # before reading: what it said last is read in any case
            end = self._read() or not alive
            self._take_output()  # before its reply is looked at, so that the log has it in order
            while (text := self._frames.next()) is not None:
                report = self._take(*parse_reply(text))
                if report is not None:
                    return report
        except BadFrame as error:
            self.kill()
            return self._gone(f"its worker process {error}, and was killed")
        if end:
            return self._gone(f"its worker process {self._death()}")
        now = time.monotonic()
        if now >= self.deadline:
            self.kill()
            return self._gone(f"no answer within {self._limit_s:g} s, its worker process was killed", hung=True)
        if self._memory_gib is not None and now >= self._next_look:
            self._next_look = now + LOOK_S
            if resident_bytes(self._process.pid) > self._memory_gib * 2**30:
                self.kill()
                return self._gone(
                    f"its worker process took more than reward.memory_gib = {self._memory_gib:g}, and was killed"
                )
        return None

    def kill(self) -> None:
        """End the process and what it started. Idempotent."""
        if self._killed:
            return
        self._killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._take_output()
        self._close()

    def _close(self) -> None:
        self._socket.close()
        os.close(self._printed)
        os.close(self._lifeline)

    def _request(self, content: dict[str, Any]) -> None:
        self._number = next(_numbers)
        self._stale = 0
        self._outgoing = memoryview(frame({"request": self._number, **content}))
        self._write()

    def _write(self) -> None:
        with suppress(BlockingIOError):
            while self._outgoing:
                try:
                    sent = self._socket.send(self._outgoing)
                except (BrokenPipeError, ConnectionResetError):  # it died: reading will say so
                    self._outgoing = b""
                    return
                self._outgoing = self._outgoing[sent:]

    def _read(self) -> bool:
        """Read what there is of the connection. Returns whether it has ended."""
        with suppress(BlockingIOError):
            for _ in range(_READS):
                try:
                    data = self._socket.recv(_READ_BYTES)
                except ConnectionResetError:
                    return True
                if not data:
                    return True
                self._frames.feed(data)
        return False

    def _take_output(self) -> None:
        with suppress(BlockingIOError):
            for _ in range(_READS):
                if not self._output_open:
                    return
                data = os.read(self._printed, _READ_BYTES)
                self._output_open = bool(data)
                self._output.take(data)

    def _take(self, number: int, kind: str, value: Any) -> Report | None:
        if number != self._number:
            self._stale += 1
            if self._stale > _STALE_LIMIT:
                raise BadFrame(f"sent more than {_STALE_LIMIT:,} replies that nobody waits for")
            return None
        if kind == "error" and isinstance(value, str):
            raise UserError(visible(value))
        if self.starting:
            if kind == "loading" and isinstance(value, str):
                self._loading = value
            elif kind == "ready":
                self.starting = False
                self.load_s = time.monotonic() - self.started
            else:
                raise BadFrame("sent something that is no reply")
            return None
        task = self.task
        assert task is not None, "an idle reward worker is not attended"
        if kind == "scores" and _are_scores(value, len(task.indices)):
            return self._done(value)
        if kind == "raised" and isinstance(value, str):
            return self._done(visible(value))
        raise BadFrame("sent something that is no reply")

    def _done(self, outcome: list[float | None] | str, hung: bool = False) -> Report:
        task, self.task = self.task, None
        assert task is not None, "a task ends once"
        self._number = 0  # of no request
        return Report(task, outcome, hung, self._stale)

    def _gone(self, how: str, hung: bool = False) -> Report:
        if self.task is not None:  # without one, what says that it is ready and is dead by now has not loaded either
            return self._done(how, hung)
        said = f"; the last that it printed: {self._output.last_line}" if self._output.last_line else ""
        log = self._output.log.path
        where = f" (all of it in {log})" if said and log is not None else ""
        raise UserError(f"reward.functions: `{self._loading}`: while it was loaded, {how}{said}{where}")

    def _death(self) -> str:
        try:
            code = self._process.wait(timeout=END_LIMIT_S if ends(self._process.pid) else 0.5)
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        else:
            how = f"died of {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        self.kill()
        return how


def signal_name(number: int) -> str:
    """`SIGKILL`; real-time signals have a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _are_scores(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(
            score is None or (type(score) is float and math.isfinite(score) and abs(score) <= SCORE_LIMIT)
            for score in value
        )
    )
