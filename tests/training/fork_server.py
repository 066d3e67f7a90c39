"""Runs `qarl` command lines in forks of a process that has everything imported: a start costs a tenth of a new one.

stdin: a JSON line {argv, cwd, output, before}; stdout: the pid, then the exit code. `before` is Python to run first.
"""

from __future__ import annotations

import gc
import json
import os
import sys

import torch.utils.tensorboard  # noqa: F401 - imported for the forks

import qarl.training.loop  # noqa: F401
from qarl import cli


def serve() -> None:
    gc.freeze()  # so that a fork's collections touch, and copy, none of it
    while line := sys.stdin.readline():
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return run(**order)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run(argv: list[str], cwd: str, output: str, before: str) -> None:
    for fd, path in ((0, os.devnull), (1, f"{output}.out"), (2, f"{output}.err")):
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, fd)
        os.close(target)
    os.chdir(cwd)
    sys.argv = ["qarl", *argv]
    exec(before, {})
    try:
        cli.main(argv)
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)  # taking all of torch down takes a second


if __name__ == "__main__":
    serve()
