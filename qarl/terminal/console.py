"""rich's console for untrusted text, which escapes control characters and ignores markup, and tables on it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

import rich.console
from rich.box import SIMPLE_HEAD
from rich.console import ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from qarl.report.blocks import Table
from qarl.terminal.streams import InertStream
from qarl.utils.text import visible


class Console(rich.console.Console):
    """rich's console, in which text that looks like markup, a link or an escape sequence is printed literally.

    Args:
        file: The stream. Default: the current standard output, or standard error with `stderr`.
        stderr: Use standard error.
        options: Options of rich's console.
    """

    def __init__(self, file: TextIO | None = None, *, stderr: bool = False, **options: Any) -> None:
        stream: Any = file or (sys.stderr if stderr else sys.stdout)
        if isinstance(stream, InertStream):
            stream = stream.outlet  # rich itself may emit colours and cursor movements
        super().__init__(file=stream, markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style = segment.text, segment.style
            if style is not None and style.link:  # from library output captured by a live display
                style = style.update_link(None)
            if not segment.control:
                text = visible(text, keep_newlines=True)
            yield segment if text == segment.text and style is segment.style else Segment(text, style)


def table_console() -> Console:
    """Return a console on standard output with the terminal's width; 160 characters in a pipe, which has no width."""
    return Console(width=None if sys.stdout.isatty() else 160)


def print_table(table: Table, console: Console, stacked: bool = False, wrapped: bool = False) -> None:
    """Print a table. Columns that do not fit the console follow in further tables, each with the first column.

    Args:
        table: The table; its note is not printed.
        console: The console.
        stacked: Write headers of right-aligned columns with one word per line, because numbers are narrow.
        wrapped: Wrap text to fit the console, instead of splitting the table.
    """
    unbounded = console.options.update(max_width=10_000)
    left = list(range(1, len(table.columns)))
    while True:
        count = len(left)
        while True:
            shown = _rich_table(table, [0, *left[:count]], stacked)
            if wrapped or count <= 1 or Measurement.get(console, unbounded, shown).maximum <= console.width:
                break
            count -= 1
        console.print(shown)
        left = left[count:]
        if not left:
            return


def _rich_table(table: Table, columns: list[int], stacked: bool) -> RichTable:
    """Return some columns of a table."""
    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False, title=Text(table.caption) if table.caption else None)
    shown.title_justify = "left"
    for index in columns:
        name, align = visible(table.columns[index].name), table.columns[index].align
        if stacked and align == "right":
            name = "\n".join(name.replace(",", "").split())
        shown.add_column(Text(name), justify=align)
    for row in table.rows:
        shown.add_row(*(Text(visible(row[index], keep_newlines=True)) for index in columns))
    return shown
