"""Runs `qarl` command lines, or other programs: orders are {argv, cwd, before, program}.

`before` is Python to run first. Members of a comparison and a sampler of its own process are forks too.
"""

from __future__ import annotations

import os
import sys

import forked_popen
import torch.utils.tensorboard  # noqa: F401 - imported for the forks
from forks import run_program, serve

import qarl.exporting.verify
import qarl.report.run_report
import qarl.training.loop  # noqa: F401
from qarl import cli
from qarl.comparison import start_members
from qarl.rollout.vllm import process


def run(argv: list[str], cwd: str, before: str, program: str = "qarl") -> None:
    os.chdir(cwd)
    sys.argv = [program, *argv]
    for module in (start_members, process):
        forked_popen.install(module)
    exec(before, {})
    if program == "qarl":
        cli.main(argv)
    else:
        run_program(program, argv)


if __name__ == "__main__":
    serve(run)
