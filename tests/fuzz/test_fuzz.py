"""The command line on mutated input, by `tools/fuzz.py`: nothing bad in series of fixed seeds.

Other cases are a person's to draw (the tool's own seed is the date): a change must not fail by what the day draws.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def fuzz(seed: str, *arguments: str) -> None:
    """Run the tool; fail with what it printed, which says how to run a case again."""
    paths = [str(ROOT / part) for part in (".", "kernels", "quant_formats")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "--seed", seed, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    print(f"seed {seed}", done.stdout, sep="\n")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"


@pytest.mark.slow
def test_nothing_is_bad_in_a_fixed_series() -> None:
    fuzz("ci", "--count", "10", "--accepted-train", "1")
