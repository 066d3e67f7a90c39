"""The command line of this process, for records and for what to type again."""

from __future__ import annotations

import sys
from pathlib import Path


def command_line() -> list[str]:
    """`qarl ...` as it was typed, or `python SCRIPT ...` where a script of the user's calls qarl from Python."""
    program = Path(sys.argv[0])
    if program.suffix == ".py" and program.name != "__main__.py":
        return ["python", *sys.argv]
    return ["qarl", *sys.argv[1:]]
