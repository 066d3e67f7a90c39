"""Real ranks for tests: a function of a test's file in several processes that are one `Group`.

    def says(group, word):                       # at the top of the test's file, which the ranks import
        return group.gather([group.rank, word])

    run_ranks(3, f"{__file__}:says", {"word": "hi"}) == [[[0, "hi"], [1, "hi"], [2, "hi"]]] * 3

They are forks of one process that has torch and qarl imported, once a session.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Never

from process_tree import abort

ROOT = Path(__file__).parents[2]
PATHS = (
    *(".", "kernels", "quant_formats", "tools"),
    *("tests", "tests/distributed", "tests/policy", "tests/training"),
)
TICK_S = 0.01


def run_ranks(
    count: int,
    function: str,
    arguments: Mapping[str, Any] | None = None,
    limit_s: float = 200,
    timeout_s: float = 30,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `function(group, **arguments)` in `count` processes; returns the results in rank order.

    function: "path of a file:name". arguments, results: JSON values. limit_s: All are killed afterwards. timeout_s: Of
    the group's collectives. environment: Further variables. If an exit code is not 0, fails with the ranks' output.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        codes = wait_ranks(start_ranks(count, function, arguments, folder, timeout_s, environment), limit_s)
        if any(code != 0 for code in codes):
            printed = "\n".join(f"--- rank {r}\n{output(folder, r)}" for r in range(count))
            raise AssertionError(f"exit codes {codes} of {function}\n{printed}")
        return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(count)]


class Rank:
    """A process that `start_ranks` started; `returncode` is negative if a signal ended it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._code, self.returncode = folder / f"code-{rank}", None
        self.pid = int(_await(folder / f"pid-{rank}"))

    def poll(self) -> int | None:
        if self.returncode is None and self._code.exists():
            self.returncode = int(self._code.read_text())
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


class Program(Rank):
    """A Python file that runs in a fork, as a `Popen` with pipes for stdout and stderr."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 0)
        self._folder = folder

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it printed, once it has ended."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(TICK_S)
        return output(self._folder, 0), (self._folder / "errors-0").read_text(errors="replace")


def start_ranks(
    count: int,
    function: str,
    arguments: Mapping[str, Any] | None,
    folder: Path,
    timeout_s: float = 30,
    environment: Mapping[str, str] | None = None,
) -> list[Rank]:
    """As `run_ranks`, without waiting. folder: an empty one for what they need and print, `result-0` and so on."""
    order = {
        "count": count,
        "function": function,
        "arguments": dict(arguments or {}),
        "timeout_s": timeout_s,
        "environment": dict(environment or {}),
        "folder": str(folder),
    }
    _send(order)
    return [Rank(folder, rank) for rank in range(count)]


def start_program(argv: list[str], folder: Path, cwd: Path, environment: Mapping[str, str]) -> Program:
    """Run a Python file with its arguments in a fork. folder: an empty one for `output-0` and `errors-0`."""
    _send({"count": 1, "program": argv, "cwd": str(cwd), "environment": dict(environment), "folder": str(folder)})
    return Program(folder)


def _send(order: Mapping[str, Any]) -> None:
    server = _server()
    assert server.stdin is not None
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()


def wait_ranks(ranks: list[Rank], limit_s: float = 60) -> list[int | None]:
    """The exit codes; None for a rank that had to be killed, which then prints its stacks."""
    end = time.monotonic() + limit_s
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
        time.sleep(TICK_S)
    codes = [rank.poll() for rank in ranks]
    abort([rank.pid for rank, code in zip(ranks, codes, strict=True) if code is None])
    return codes


def output(folder: Path, rank: int) -> str:
    """What a rank printed."""
    return (folder / f"output-{rank}").read_text(errors="replace")


def _await(path: Path) -> str:
    """The contents of a file that the server is about to write; it may have to import everything first."""
    end = time.monotonic() + 400
    while not path.exists():
        assert _server().poll() is None and time.monotonic() < end, "the ranks' server has failed"
        time.sleep(TICK_S)
    return path.read_text()


@functools.cache
def _server() -> subprocess.Popen[str]:
    paths = [*(str(ROOT / part) for part in PATHS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True, env=environment)
    atexit.register(server.kill)
    return server


# --- in the server, whose imports its forks have


def _serve() -> Never:
    import qarl.distributed.group
    import qarl.training.setup  # noqa: F401

    gc.freeze()  # so that a fork's collections touch, and copy, none of it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those end that keep a test's ranks
    server = os.getpid()
    while line := sys.stdin.readline():
        if os.fork() == 0:
            _keep(json.loads(line), server)
    os._exit(0)


def _keep(order: dict[str, Any], server: int) -> Never:
    """Start a test's ranks, and write down how each of them ends. They end with the server."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    running = {}
    for rank in range(order["count"]):
        pid = _fork(rank, order)
        running[pid] = rank
        _write(Path(order["folder"], f"pid-{rank}"), pid)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            _write(Path(order["folder"], f"code-{running.pop(pid)}"), os.waitstatus_to_exitcode(status))
        elif os.getppid() != server:
            for left in running:
                os.kill(left, signal.SIGKILL)
        else:
            time.sleep(TICK_S)
    os._exit(0)


def _write(path: Path, number: int) -> None:
    with suppress(FileNotFoundError):  # the test is over
        path.with_suffix(".part").write_text(str(number))
        path.with_suffix(".part").rename(path)


def _fork(rank: int, order: dict[str, Any]) -> int:
    if pid := os.fork():
        return pid
    from forks import redirect

    program = "program" in order
    printed = str(Path(order["folder"], f"output-{rank}"))
    redirect({0: os.devnull, 1: printed, 2: str(Path(order["folder"], f"errors-{rank}")) if program else printed})
    faulthandler.enable()
    own = {"RANK": rank, "WORLD_SIZE": order["count"], "LOCAL_RANK": rank, "QARL_RANKS": order["folder"]}
    os.environ.update({**({} if program else {name: str(own[name]) for name in own}), **order["environment"]})
    code: Any = 1
    try:
        if program:
            _run_program(order)
        else:
            _call(rank, order)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_program(order: dict[str, Any]) -> None:
    from forks import run_program

    os.chdir(order["cwd"])
    tempfile.tempdir = None  # TMPDIR may be another one
    run_program(order["program"][0], order["program"][1:])


def _call(rank: int, order: dict[str, Any]) -> None:
    """One rank."""
    import torch

    from qarl.distributed.group import Group
    from qarl.distributed.rank_info import rank_info
    from qarl.distributed.rendezvous import Rendezvous

    path, _, name = order["function"].rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    own = rank_info()
    assert own is not None
    with Group(Rendezvous(own), torch.device("cpu"), order["timeout_s"]) as group:
        result = getattr(module, name)(group, **order["arguments"])
        Path(order["folder"], f"result-{rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    _serve()
