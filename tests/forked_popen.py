"""A stand-in for `subprocess.Popen` of a Python program: a fork of the parent, with everything that it imported."""

import faulthandler
import gc
import math
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, Never

import torch


class ForkedPopen:
    """A fork that stands for the process of `[python, ...]`.

    Args:
        args: As `Popen` takes it: Python with `-c CODE`, `-m MODULE` or a script, and arguments.
        body: What runs in the fork, given `args`, instead of its program.
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
                _leave(end)
            _leave(SystemExit(0))
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
    """What an exec of the command would leave of this process."""
    gc.freeze()  # or a file of the parent's closes a descriptor of the child's
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if new_session:
        os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, output in outputs.items():
        if output is not None:
            os.dup2(output.fileno(), fd)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    at = 3
    for fd in (*sorted(pass_fds), os.sysconf("SC_OPEN_MAX")):
        os.closerange(at, fd)
        at = fd + 1
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)  # a fork has none of the threads that the parent's pool counts on


def _run(command: list[str]) -> None:
    """What `python -c CODE`, `python -m MODULE` or `python SCRIPT` runs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program, *rest = [part for part in command[1:] if part != "-u"]
    if program == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    elif program == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *rest]
        runpy.run_path(program, run_name="__main__")


def _leave(end: BaseException) -> Never:
    """End as an interpreter does, without taking down what was imported."""
    code: Any = 0 if not isinstance(end, SystemExit) else end.code
    if not isinstance(end, SystemExit):
        traceback.print_exception(end)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
