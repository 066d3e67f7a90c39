"""`python inline_runs.py ORDERS`: several `qarl` command lines in one process, which imports vLLM once.

ORDERS: a JSON list of {argv, output, before}; what a run prints goes to `output`.out and .err, its exit code to .code.
`before`: Python to run first.
"""

import json
import os
import sys
from pathlib import Path

from forks import redirect

from qarl import cli


def run(argv: list[str], output: str, before: str) -> None:
    redirect({1: f"{output}.out", 2: f"{output}.err"})
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
