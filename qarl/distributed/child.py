"""One rank of `qarl train --nproc`: the command line, which asks for a safe stop when its launcher is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main(launcher: int, argv: list[str]) -> None:
    """Run the `qarl` command line `argv`. launcher: pid of the process that started this one."""
    stop_with(launcher)
    sys.argv = ["qarl", *argv]  # what environment.json records
    from qarl.cli import main as qarl

    qarl(argv)


def stop_with(launcher: int) -> None:
    """Have the kernel send SIGTERM when the launcher is gone, however it ended: a run then saves and stops."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it was gone before we asked to be told
        os._exit(1)
