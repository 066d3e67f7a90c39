"""Types of the benchmarks' options: what cannot be is refused before anything is measured, in one line."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path


def out_file(text: str) -> Path:
    """The path of a file to write, its folder made. Raises ArgumentTypeError where no file can be written there."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path.parent}: {error.strerror}; name a file in a folder of yours") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; name a file in a folder of yours")
    return path


def count(text: str) -> int:
    """An integer from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer from 1")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return number
