"""The parent's handle of one reward worker process; the process itself is `worker.main`."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.errors import UserError

START_LIMIT_S = 120.0  # interpreter, and whatever the user's modules import

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from qarl.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


@dataclass(frozen=True)
class Task:
    """One call: a function (its index) on a contiguous part of the batch."""

    function: int
    indices: range


class Worker:
    """Starting until `ready` is received, then idle, or busy with `task` until `deadline` (time.monotonic).

    It leads a session of its own: the terminal's Ctrl-C does not reach it, and `kill` also ends what a reward function
    started.
    """

    def __init__(
        self,
        functions: list[tuple[str, str, dict[str, Any]]],
        columns: list[str] | None,
        lifeline: int,
        log_path: Path | None,
    ) -> None:
        self.connection, child = multiprocessing.Pipe()
        log = None if log_path is None else log_path.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, json.dumps(sys.path), str(child.fileno()), str(lifeline)],
                stdin=subprocess.DEVNULL,
                stdout=2 if log is None else log,  # never the parent's stdout, which may be piped somewhere
                stderr=2 if log is None else log,
                pass_fds=[child.fileno(), lifeline],
                start_new_session=True,
            )
        finally:
            child.close()
            if log is not None:
                log.close()
        self.task: Task | None = None
        self.starting = True
        self.deadline = time.monotonic() + START_LIMIT_S
        self._limit_s = START_LIMIT_S
        self._loading = functions[0][0]
        self._killed = False
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: `receive` will say so
            self.connection.send((functions, columns))

    @property
    def alive(self) -> bool:
        return not self._killed and self._process.poll() is None

    def send(
        self,
        task: Task,
        completions: list[str],
        prompts: list[str],
        columns: dict[str, list],
        limit_s: float,
    ) -> None:
        """Hand a task to an idle worker."""
        self.task = task
        self._limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send((task.function, completions, prompts, columns))

    def receive(self) -> tuple[Task, list[float] | str] | None:
        """Read one report. Returns the finished task with its scores or with what went wrong; None while starting.

        Raises UserError if it cannot load the functions, or a function found a fault of the user's.
        """
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return self._gone(f"its worker process {self._death()}")
        if kind == "loading":
            self._loading = value
            return None
        if kind == "ready":
            self.starting = False
            return None
        if kind == "error":
            raise UserError(value)
        assert self.task is not None, f"reward worker reports {kind!r} without a task"
        task, self.task = self.task, None
        return task, value

    def time_out(self) -> tuple[Task, list[float] | str]:
        """Kill it for its deadline. Raises UserError if it was still starting."""
        self.kill()
        return self._gone(f"no answer within {self._limit_s:g} s, its worker process was killed")

    def kill(self) -> None:
        """End the process and what it started. Idempotent."""
        if self._killed:
            return
        self._killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()

    def _gone(self, how: str) -> tuple[Task, list[float] | str]:
        if self.starting:
            raise UserError(f"reward.functions: `{self._loading}`: while it was loaded, {how}")
        assert self.task is not None, "an idle reward worker is not waited for"
        task, self.task = self.task, None
        return task, how

    def _death(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        else:
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self.kill()
        return how
