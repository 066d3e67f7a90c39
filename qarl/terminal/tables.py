"""Tables on the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from qarl.report.blocks import Table
from qarl.utils.text import visible


def print_table(table: Table, console: Console, stacked: bool = False) -> None:
    """Print a table. Columns that do not fit the console follow in further tables, each with the first column.

    Args:
        table: The table; its note is not printed.
        console: The console.
        stacked: One word per line in the headers of right-aligned columns, because numbers are narrow.
    """
    unbounded = console.options.update(max_width=10_000)
    left = list(range(1, len(table.columns)))
    while True:
        count = len(left)
        while True:
            shown = _rich_table(table, [0, *left[:count]], stacked)
            if count <= 1 or Measurement.get(console, unbounded, shown).maximum <= console.width:
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
    for place in columns:
        name, align = visible(table.columns[place].name), table.columns[place].align
        if stacked and align == "right":
            name = "\n".join(name.replace(",", "").split())
        shown.add_column(Text(name), justify=align)
    for row in table.rows:
        shown.add_row(*(Text(visible(row[place], keep_newlines=True)) for place in columns))
    return shown
