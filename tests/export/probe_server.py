"""Runs `qarl.export.vllm_probe` in forks of a process that has vLLM imported, which takes longer than a probe.

stdin: a JSON line {argv, output} per probe; stdout: its exit code. What it prints goes to `output`.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback

from qarl.export.vllm_probe import ENVIRONMENT

os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})

import vllm
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker


def serve() -> None:
    gc.freeze()  # so that a fork's collections touch, and copy, none of it
    while line := sys.stdin.readline():
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(**order)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)  # taking all of vLLM down takes a second


def run(argv: list[str], output: str) -> None:
    for fd, path in ((0, os.devnull), (1, output), (2, output)):
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(target, fd)
        os.close(target)
    sys.argv = ["vllm_probe", *argv]
    code = 1
    try:
        runpy.run_module("qarl.export.vllm_probe", run_name="__main__")
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    vllm.LLM  # noqa: B018 - imported when it is asked for
    serve()
