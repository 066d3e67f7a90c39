"""Work in forks of a process that has everything imported: a start costs a tenth of a new one.

A server is a script that imports what its work needs and calls `serve`; a test holds a `ForkServer` of it.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Never

ROOT = Path(__file__).parents[1]


# --- in the server


def serve(work: Callable[..., None]) -> Never:
    """Run `work` in a fork for every JSON line of stdin: {out, err, and what it takes}.

    out, err: files for what it prints; the same one for both is allowed. stdout gets the pid, then the exit code.
    """
    gc.freeze()  # so that a fork's collections touch, and copy, none of it
    while line := sys.stdin.readline():
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(work, **order)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)  # taking down what was imported takes a second, and some of it prints pages


def _run(work: Callable[..., None], out: str, err: str, **order: Any) -> Never:
    redirect({0: os.devnull, 1: out, 2: err})
    code: Any = 0
    try:
        work(**order)
    except SystemExit as end:
        code = end.code
    except Exception:  # as an interpreter ends, without taking down what was imported
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_program(program: str, argv: list[str]) -> None:
    """What `python program argv` runs: a file by its path, or a module by its name."""
    sys.argv = [program, *argv]
    if program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__")


def redirect(places: Mapping[int, str]) -> None:
    """Let this process's file descriptors be those files, emptied."""
    for fd, path in places.items():
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(target, fd)
        os.close(target)


# --- in a test


class ForkServer:
    """A server's process, for one order at a time. It finds the project's modules and those of this folder.

    environment: its variables, default this process's. One thread: a process whose thread pool has started cannot be
    forked.
    """

    def __init__(self, script: Path, *arguments: str, environment: Mapping[str, str] = os.environ) -> None:
        paths = [*(str(ROOT / part) for part in (".", "kernels", "quant_formats", "tests"))]
        paths += filter(None, [environment.get("PYTHONPATH")])
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        self._under_way: int | None = None

    def start(self, out: Path | str, err: Path | str, **order: Any) -> int:
        """Give an order; returns the pid of its fork."""
        self._end_what_was_left()
        self._process.stdin.write(json.dumps({"out": str(out), "err": str(err), **order}) + "\n")
        self._process.stdin.flush()
        self._under_way = int(self._process.stdout.readline())
        return self._under_way

    def wait(self) -> int:
        """The exit code of what was started; negative: the signal that ended it."""
        code = int(self._process.stdout.readline())
        self._under_way = None
        return code

    def run(self, out: Path | str, err: Path | str, **order: Any) -> int:
        self.start(out, err, **order)
        return self.wait()

    def _end_what_was_left(self) -> None:
        """A test that failed did not wait for its fork, whose exit code the next one would be given."""
        if self._under_way is not None:
            with suppress(ProcessLookupError):
                os.kill(self._under_way, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        self._end_what_was_left()
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
