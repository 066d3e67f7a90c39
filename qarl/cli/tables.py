"""Console for tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qarl.terminal.console import Console


def table_console() -> Console:
    """Return a console on standard output with the terminal's width; unlimited width in a pipe."""
    from qarl.terminal.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)
