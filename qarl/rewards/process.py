"""The parent's handle of a reward worker process, whose code is `worker.main`."""

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
from qarl.utils.signals import signal_name
from qarl.utils.text import visible

START_LIMIT_S = 120.0  # starting the interpreter and importing the user's modules
END_LIMIT_S = 30.0  # for an exiting process to disappear
LOOK_S = 0.1  # between checks of a worker's memory and liveness

_READ_BYTES = 2**16
_READS = 64  # reads per descriptor and turn, so that a flood does not block other workers
_STALE_LIMIT = 1000  # unexpected replies per call before the worker is killed

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from qarl.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)

_numbers = itertools.count(1)  # request numbers, shared by all workers of this process


@dataclass(frozen=True)
class Task:
    """One call: a function (by index) on a contiguous part of the batch."""

    function: int
    indices: range


@dataclass(frozen=True)
class Report:
    """Result of a task.

    Attributes:
        task: The task.
        outcome: One score per completion (None: the function skipped the row), or an error message.
        hung: Whether it exceeded its time limit.
        stale: Number of dropped replies to other calls.
    """

    task: Task
    outcome: list[float | None] | str
    hung: bool = False
    stale: int = 0


class Worker:
    """A worker process: starting until it reports `ready`, then idle, or busy with `task` until `deadline`
    (`time.monotonic()`).

    The process leads its own session: the terminal's Ctrl-C does not reach it, and `kill` also ends processes started
    by a reward function. Its output is untrusted: it is read without blocking, as data of at most `REPLY_BYTES`.

    Args:
        functions: (label, name, options) per function.
        columns: Names of the data columns.
        log: Gets the output of the functions.
        memory_gib: Memory limit, or None.
    """

    def __init__(
        self,
        functions: list[tuple[str, str, dict[str, Any]]],
        columns: list[str],
        log: RewardLog,
        memory_gib: float | None,
    ) -> None:
        self._socket, child = socket.socketpair()
        self._socket.setblocking(False)
        self._printed, prints = os.pipe()
        # Nothing is written to this pipe: its end tells the worker that the parent is gone. One pipe per worker,
        # because the kernel notifies only one process.
        life, self._lifeline = os.pipe()
        os.set_blocking(self._printed, False)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, json.dumps(sys.path), str(child.fileno()), str(life)],
                stdin=subprocess.DEVNULL,
                stdout=prints,
                stderr=prints,
                pass_fds=[child.fileno(), life],
                start_new_session=True,
                # A function that calls init_process_group or a hub client must not act as a rank of the run.
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
        """Whether the process was killed, or died while idle. If it dies while starting or busy, `attend` reports it
        first.
        """
        return self._killed or (not (self.starting or self.task) and self._process.poll() is not None)

    def send(self, task: Task, arguments: dict[str, Any], limit_s: float) -> None:
        """Send a task to an idle worker.

        Args:
            task: The task.
            arguments: completions, prompts and columns.
            limit_s: Time limit in seconds.
        """
        self.task = task
        self._limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self._output.begin()
        self._request({"function": task.function, **arguments})

    def watch(self, poll: select.poll) -> None:
        """Register the descriptors that make `poll` return when `attend` has work to do."""
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        if self._output_open:
            poll.register(self._printed, select.POLLIN)

    def attend(self) -> Report | None:
        """Read and write without blocking.

        Returns:
            The result of the task once it has ended; None while the worker is starting or busy.

        Raises:
            UserError: The worker cannot load the functions, or a function reported a configuration error.
        """
        try:
            self._write()
            alive = self._process.poll() is None  # before reading, so that the last output of a dead process is read
            end = self._read() or not alive
            self._take_output()  # before parsing the reply, so that the log is in order
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
                    f"its worker process exceeded reward.memory_gib = {self._memory_gib:g} and was killed"
                )
        return None

    def kill(self) -> None:
        """End the process and everything it started. Idempotent."""
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
                except (BrokenPipeError, ConnectionResetError):  # it died; reading will report that
                    self._outgoing = b""
                    return
                self._outgoing = self._outgoing[sent:]

    def _read(self) -> bool:
        """Read what is available. Return whether the connection has ended."""
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
                raise BadFrame(f"sent more than {_STALE_LIMIT:,} unexpected replies")
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
                raise BadFrame("sent an invalid reply")
            return None
        task = self.task
        assert task is not None, "attend must not be called on an idle worker"
        if kind == "scores" and _are_scores(value, len(task.indices)):
            return self._done(value)
        if kind == "raised" and isinstance(value, str):
            return self._done(visible(value))
        raise BadFrame("sent an invalid reply")

    def _done(self, outcome: list[float | None] | str, hung: bool = False) -> Report:
        task, self.task = self.task, None
        assert task is not None, "a task must end only once"
        self._number = 0  # no request in flight
        return Report(task, outcome, hung, self._stale)

    def _gone(self, how: str, hung: bool = False) -> Report:
        if self.task is not None:  # without a task, a worker that reported ready but is dead counts as not loaded
            return self._done(how, hung)
        last_output = f"; last output: {self._output.last_line}" if self._output.last_line else ""
        log = self._output.log.path
        where = f" (full output in {log})" if last_output and log is not None else ""
        raise UserError(f"reward.functions: `{self._loading}`: while loading it, {how}{last_output}{where}")

    def _death(self) -> str:
        try:
            code = self._process.wait(timeout=END_LIMIT_S if ends(self._process.pid) else 0.5)
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        else:
            how = f"died of {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        self.kill()
        return how


def _are_scores(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(
            score is None or (type(score) is float and math.isfinite(score) and abs(score) <= SCORE_LIMIT)
            for score in value
        )
    )
