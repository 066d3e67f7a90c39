"""Runs `qarl` command lines: orders are {argv, cwd, before}. `before` is Python to run first."""

from __future__ import annotations

import os
import sys

import torch.utils.tensorboard  # noqa: F401 - imported for the forks
from forks import serve

import qarl.training.loop  # noqa: F401
from qarl import cli


def run(argv: list[str], cwd: str, before: str) -> None:
    os.chdir(cwd)
    sys.argv = ["qarl", *argv]
    exec(before, {})
    cli.main(argv)


if __name__ == "__main__":
    serve(run)
