"""One rank of `qarl train --nproc`: runs the command line, and stops safely if the launcher is gone."""

from __future__ import annotations

import signal
import sys

from qarl.utils.signals import signal_at_end_of


def main(launcher: int, argv: list[str]) -> None:
    """Run the `qarl` command line `argv`. launcher: pid of the process that started this one."""
    signal_at_end_of(launcher, signal.SIGTERM)  # a run then saves and stops
    sys.argv = ["qarl", *argv]  # what environment.json records
    from qarl.cli import main as qarl

    qarl(argv)
