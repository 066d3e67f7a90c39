"""Render sections to one HTML file without scripts or network access.

All external text is untrusted. It is escaped in one place, jinja2's autoescape, after `visible` has escaped control,
bidirectional and invisible characters. Only the SVG of `charts` is inserted as markup.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from qarl.report.blocks import BarChart, Block, Chart, LineChart, Scatter, Section, Table, Text
from qarl.report.charts import DARK_CURVES, LIGHT_CURVES, chart_note, file_name, png, svg
from qarl.report.drawing import curve_style, has_data, legend_names
from qarl.report.formatting import number
from qarl.report.parallel_render import render_in_parallel
from qarl.storage.disk import write_together
from qarl.utils.text import visible

GENERATOR = '<meta name="generator" content="qarl">'  # identifies pages that may be overwritten
SHOWN_CHARACTERS = 20_000  # per prompt or completion
# Limits of a page, which notes what it omits. A chart takes 0.1 s and 10 kB; the legend of more curves would hide them.
CHARTS = 60  # per section
CURVES = 30  # per chart
BARS = 60  # per chart
ROWS = 1000  # per table


@dataclass
class _Group:
    """Consecutive charts, or one other block."""

    kind: str
    block: Block | None = None
    charts: list[dict[str, Any]] = field(default_factory=list)


def render_page(title: str, subtitle: str, sections: list[Section]) -> str:
    """Render the page as HTML, deterministically. Sections without blocks and intro are omitted."""
    numbers = iter(range(1, 1 + sum(len(section.blocks) for section in sections)))
    shown = [
        {"title": section.title, "intro": section.intro, "groups": _groups(section.blocks, numbers)}
        for section in sections
        if section.blocks or section.intro
    ]
    template = _environment().get_template("page.html.j2")
    constants = {"generator": Markup(GENERATOR), "light": LIGHT_CURVES, "dark": DARK_CURVES}
    return template.render(title=title, subtitle=subtitle, sections=shown, **constants)


def write_page(
    path: Path,
    title: str,
    subtitle: str,
    sections: list[Section],
    *,
    names: Mapping[str, str] | None = None,
    beside: Mapping[Path, bytes] | None = None,
) -> list[Path]:
    """Write the page to `path` and its charts as PNG files to plots/ next to it, atomically. Applies `bounded`.

    Args:
        path: The page's file.
        title, subtitle, sections: See `render_page`.
        names: Chart title -> file name, for charts that are not named after their titles.
        beside: Other files of the page, replaced together with it.

    Returns:
        The PNG files.

    Raises:
        UserError: A file cannot be written. Then all files are unchanged.
    """
    sections = bounded(sections)
    charts = [block for section in sections for block in section.blocks if isinstance(block, Chart)]
    with render_in_parallel(sections):
        names = names or {}
        files = {path.parent / "plots" / names.get(c.title, file_name(c)): png(c) for c in charts if has_data(c)}
        html = render_page(title, subtitle, sections)
    write_together({**(beside or {}), **files, path: html.encode()}, "--out")
    return list(files)


def bounded(sections: list[Section]) -> list[Section]:
    """Limit sections to `CHARTS` charts, `CURVES` curves or `BARS` bars per chart, and `ROWS` rows per table.

    Trackers and rewards may log thousands of metrics, which would take minutes to draw. The notes of charts and tables,
    and a text at the end of a section, say what was omitted.
    """
    return [replace(section, blocks=_bounded_blocks(section.blocks)) for section in sections]


def _bounded_blocks(blocks: Sequence[Block]) -> list[Block]:
    charts = [block for block in blocks if isinstance(block, Chart)]
    extra = charts[CHARTS:]
    left_out = set(map(id, extra))
    kept = [_bounded(block) for block in blocks if id(block) not in left_out]
    if extra:
        first = f"{extra[0].title} and {len(extra) - 1:,} more" if len(extra) > 1 else extra[0].title
        kept.append(Text(f"Not drawn, because a section has at most {CHARTS} charts: {first}.", "note"))
    return kept


def _bounded(block: Block) -> Block:
    if isinstance(block, LineChart) and len(block.series) > CURVES:
        return replace(block, series=block.series[:CURVES], note=_more(block.note, CURVES, block.series, "curves"))
    if isinstance(block, BarChart) and len(block.bars) > BARS:
        return replace(block, bars=block.bars[:BARS], note=_more(block.note, BARS, block.bars, "bars"))
    if isinstance(block, Table) and len(block.rows) > ROWS:
        return replace(block, rows=block.rows[:ROWS], note=_more(block.note, ROWS, block.rows, "rows"))
    return block


def _more(note: str, shown: int, all_of_them: Sequence[object], what: str) -> str:
    return f"{note} The first {shown:,} of {len(all_of_them):,} {what}.".strip()


def _groups(blocks: list[Block], numbers: Any) -> list[_Group]:
    groups: list[_Group] = []
    for block in blocks:
        if not isinstance(block, Chart):
            groups.append(_Group(type(block).__name__, block))
            continue
        if not groups or not groups[-1].charts:
            groups.append(_Group("charts"))
        groups[-1].charts.append(_chart(block, f"c{next(numbers)}-"))
    return groups


def _chart(chart: Chart, prefix: str) -> dict[str, Any]:
    legend = []
    names = legend_names(chart)
    dots = len(chart.points) if isinstance(chart, Scatter) else 0
    for index, name in enumerate(names):
        colour, dash = curve_style(index, len(LIGHT_CURVES))
        legend.append({"name": name, "colour": colour, "dash": dash, "dot": index < dots})
    # Safe as markup: `svg` builds an XML tree, so its text is escaped.
    drawing = Markup(svg(chart, prefix)) if has_data(chart) else ""
    return {"title": chart.title, "legend": legend, "svg": drawing, "note": chart_note(chart)}


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("qarl.report"),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
        finalize=_shown,
    )
    environment.filters["number"] = number
    environment.filters["shortened"] = _shortened
    return environment


def _shown(value: Any) -> Any:
    """Make a value visible; jinja2 applies this to every expression before escaping."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value.expandtabs(4), keep_newlines=True)
    return value


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]}\n… {len(text) - SHOWN_CHARACTERS:,} more characters"
