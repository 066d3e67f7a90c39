"""A sampler's process that is a fork of the learner's: it starts with everything imported that the learner has."""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace

import torch

from qarl.rollout.vllm import child, process, worker
from qarl.rollout.vllm.host import Host


class ForkedWorker:
    """Stands for the `subprocess.Popen` of `python -m qarl.rollout.vllm.child`: a fork, with what is imported here."""

    def __init__(
        self, host: type, command: list[str], *, stdin, stdout, stderr, pass_fds, start_new_session, env
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become(command, stdout, stderr, pass_fds, env)
                worker.Host = host
                worker.import_ahead = getattr(host, "import_ahead", worker.import_ahead)
                child.main()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        while os.getsid(self.pid) != self.pid:  # as Popen, which returns when the command runs, in its own session
            time.sleep(0.001)

    @staticmethod
    def _become(command: list[str], stdout, stderr, pass_fds: tuple[int, ...], env: Mapping[str, str]) -> None:
        """What an exec of the command would leave of this process."""
        gc.freeze()  # or a file of the parent's closes a descriptor of the child's
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        at = 3
        for fd in (*sorted(pass_fds), os.sysconf("SC_OPEN_MAX")):
            os.closerange(at, fd)
            at = fd + 1
        os.environ.clear()
        os.environ.update(env)
        sys.argv = command[3:]
        torch.set_num_threads(1)  # a fork has none of the threads that the parent's pool counts on

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
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.002)
        return code


def install(host: type = Host, replace=setattr) -> None:
    """Let `SamplerProcess` start forks, which serve such a host. replace: `monkeypatch.setattr` in a test."""
    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": partial(ForkedWorker, host)})
    replace(process, "subprocess", stand_in)
