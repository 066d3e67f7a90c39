"""Console for tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qarl.terminal.console import Console


def table_console() -> Console:
    """Standard output, as wide as the terminal; a pipe has no width to keep to."""
    from qarl.terminal.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)
