"""Programs in forks of processes that have everything imported: a start costs a tenth of a new one.

`main` is the server of a session, which all workers of xdist share. It forks the process that imports a module of
`TIERS` for the first order to it; that process runs every order, `module.run(**order)`, in a fork of itself.
"""

import faulthandler
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Never

ROOT = Path(__file__).parents[1]
ROOMS = ("distributed", "kernels", "policy", "rollout_vllm", "training")
PATHS = [str(ROOT / part) for part in (".", "kernels", "quant_formats", "tools", "tests")]
PATHS += [str(ROOT / "tests" / room) for room in ROOMS]
# Modules, and those whose imports begin with the former's.
TIERS: dict[str, dict[str, Any]] = {"fork_server": {"vllm_server": {}}, "compile_server": {}}
ADDRESS = "QARL_TEST_FORKS"  # directory of the server's sockets
MOST = 1 << 17  # bytes of an order


# --- in a test


def start_server() -> Callable[[], None]:
    """Start the server, which has imported nothing yet; return a function that ends it."""
    folder = tempfile.TemporaryDirectory(prefix="forks-")
    os.environ[ADDRESS] = folder.name
    # One thread, because a process with a thread pool cannot be forked.
    environment = {**os.environ, "PYTHONPATH": _paths(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    while not Path(folder.name, "ready").exists() and server.poll() is None:
        time.sleep(0.005)

    def end() -> None:
        server.communicate()
        folder.cleanup()

    return end


class Fork:
    """A process that runs an order, with the interface of `Popen`. It ends when this is gone.

    Args:
        tier: Key of `TIERS`.
        out, err: Files for what it prints; the same one for both is allowed.
        environment: Its variables. Default: this process's.
        order: What the tier's `run` takes.
    """

    def __init__(
        self, tier: str, out: Path | str, err: Path | str, environment: Mapping[str, str] = os.environ, **order: Any
    ) -> None:
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(f"{os.environ[ADDRESS]}/{tier}")
        own = {**environment, "PYTHONPATH": _paths(), "OMP_NUM_THREADS": "1"}
        self._connection.send(json.dumps([str(out), str(err), own, order]).encode())
        self.pid = int(self._connection.recv(MOST))  # empty if the server has failed

    def wait(self, timeout: float | None = None) -> int:
        """Wait and return the exit code; negative: the signal that ended the process."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            self.returncode = int(self._connection.recv(MOST))
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _paths() -> str:
    return os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])


# --- in the server


def main() -> Never:
    listeners = {}
    for tier in (*TIERS, *(name for inner in TIERS.values() for name in inner)):
        listeners[tier] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listeners[tier].bind(f"{os.environ[ADDRESS]}/{tier}")
        listeners[tier].listen(64)
    Path(os.environ[ADDRESS], "ready").touch()
    _serve(None, TIERS, listeners)


def _serve(tier: str | None, inner: dict[str, dict[str, Any]], listeners: dict[str, socket.socket]) -> Never:
    own = [listeners[tier]] if tier else []
    if tier:
        importlib.import_module(tier)
        gc.freeze()  # so that a fork's collections touch, and copy, none of it
    running: dict[int, tuple[socket.socket, int]] = {}  # descriptor of a process -> its order's connection, its pid
    while True:
        begins = {listeners[name]: first for first, more in inner.items() for name in (first, *more)}
        connections = {connection for connection, _ in running.values()}
        ready = select.select([0, *own, *begins, *connections, *running], [], [])[0]
        if 0 in ready:  # the session is over
            for _, pid in running.values():
                os.kill(pid, signal.SIGKILL)
            os._exit(0)  # taking down what was imported takes a second, and some of it prints pages
        for first in {begins[listener] for listener in ready if listener in begins}:
            if os.fork() == 0:
                for connection in connections:
                    connection.close()
                _serve(first, inner[first], listeners)
            inner = {name: more for name, more in inner.items() if name != first}
        for connection, pid in list(running.values()):
            if connection in ready:  # the test has given up
                os.kill(pid, signal.SIGKILL)
        for process in [each for each in ready if each in running]:
            connection, pid = running.pop(process)
            os.close(process)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(OSError):
                connection.send(str(code).encode())
        if tier and own[0] in ready:
            connection, _ = own[0].accept()
            order = json.loads(connection.recv(MOST))
            pid = os.fork()
            if pid == 0:
                _run(tier, *order)
            running[os.pidfd_open(pid)] = connection, pid
            connection.send(str(pid).encode())


def _run(tier: str, out: str, err: str, environment: Mapping[str, str], order: dict[str, Any]) -> Never:
    try:
        redirect({0: os.devnull, 1: out, 2: err})
        become(environment)
        faulthandler.enable()
        sys.modules[tier].run(**order)
    except BaseException as end:
        leave(end)
    leave()


# --- in a fork


def become(environment: Mapping[str, str], keep: tuple[int, ...] = ()) -> None:
    """Reset this process as an exec would, except for stdin, stdout and stderr. keep: Files that stay open."""
    gc.freeze()  # or a file of the parent's closes a descriptor of the child's
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    at = 3
    for fd in (*sorted(keep), os.sysconf("SC_OPEN_MAX")):
        os.closerange(at, fd)
        at = fd + 1
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be another one


def run_program(arguments: list[str]) -> None:
    """Run what `python ARGUMENTS` runs: `-c CODE`, `-m MODULE` or a script, with its arguments."""
    program, *rest = arguments
    if program == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    elif program == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")


def redirect(places: Mapping[int, str]) -> None:
    """Redirect this process's file descriptors to these files, which are emptied."""
    for fd, path in places.items():
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(target, fd)
        os.close(target)


def leave(end: BaseException | None = None) -> Never:
    """End as an interpreter does, but without the teardown of imported modules."""
    code: Any = 0 if end is None else 1
    if isinstance(end, SystemExit):
        code = end.code
    elif end is not None:
        traceback.print_exception(end)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    sys.modules["forks"] = sys.modules["__main__"]
    main()
