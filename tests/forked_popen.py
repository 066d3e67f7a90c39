"""A stand-in for `subprocess.Popen` of a Python program: a fork of the parent, with everything that it imported."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import torch
from forks import become, leave, run_program


class ForkedPopen:
    """A fork that stands for the process of `[python, ...]`.

    Args:
        args: As `Popen` takes it: Python with `-c CODE`, `-m MODULE` or a script, and arguments.
        body: Function that the fork calls with `args` instead of running the program.
        stdin: The fork reads nothing, whatever this is.
        stderr: A file, or `subprocess.STDOUT`.
    """

    def __init__(
        self,
        args: list[str],
        *,
        env: Mapping[str, str],
        body: Callable[[list[str]], None] | None = None,
        stdin: Any = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | int | None = None,
        cwd: Path | None = None,
        pass_fds: tuple[int, ...] = (),
        start_new_session: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if cwd is not None:
                    os.chdir(cwd)
                errors = stdout if isinstance(stderr, int) else stderr
                _become({1: stdout, 2: errors}, pass_fds, env, start_new_session)
                (body or _run)(args)
            except BaseException as end:
                leave(end)
            leave()
        while start_new_session and os.getsid(self.pid) != self.pid:  # as Popen, which returns when the command runs
            time.sleep(0.001)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.002)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def install(
    module: ModuleType, popen: Callable[..., Any] = ForkedPopen, replace: Callable[..., None] = setattr
) -> None:
    """Let a module that imports `subprocess` start forks. replace: `monkeypatch.setattr` in a test."""
    replace(module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))


def _become(
    outputs: Mapping[int, IO[bytes] | None], pass_fds: tuple[int, ...], env: Mapping[str, str], new_session: bool
) -> None:
    if new_session:
        os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, output in outputs.items():
        if output is not None:
            os.dup2(output.fileno(), fd)
    become(env, pass_fds)
    torch.set_num_threads(1)  # a fork has none of the threads that the parent's pool counts on


def _run(command: list[str]) -> None:
    """What `python -c CODE`, `python -m MODULE` or `python SCRIPT` runs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_program([part for part in command[1:] if part != "-u"])
