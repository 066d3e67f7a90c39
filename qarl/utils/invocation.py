"""The command line of this process, for records and for messages that suggest rerunning it."""

from __future__ import annotations

import sys
from pathlib import Path


def command_line() -> list[str]:
    """Return `qarl ...` as typed, or `python SCRIPT ...` if a user's script calls qarl from Python."""
    program = Path(sys.argv[0])
    if program.suffix == ".py" and program.name != "__main__.py":
        return ["python", *sys.argv]
    return ["qarl", *sys.argv[1:]]
