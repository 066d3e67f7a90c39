"""`python inline_runs.py ORDERS`: several `qarl` command lines in one process, which imports vLLM once.

ORDERS: a JSON list of {argv, output, before}; what a run prints goes to `output`.out and .err, its exit code to .code.
`before`: Python to run first.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from qarl import cli


def run(argv: list[str], output: str, before: str) -> None:
    for fd, suffix in ((1, "out"), (2, "err")):
        target = os.open(f"{output}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, fd)
        os.close(target)
    exec(before, {})
    try:
        cli.main(argv)
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        Path(f"{output}.code").write_text(str(end.code))


if __name__ == "__main__":
    for order in json.loads(Path(sys.argv[1]).read_text()):
        run(**order)
    os._exit(0)  # taking all of vLLM down takes a second
