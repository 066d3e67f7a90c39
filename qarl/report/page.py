"""Render sections to one HTML file without scripts or network access.

Everything that came from outside is hostile text. It is escaped in one place, jinja2's autoescape, after `visible` has
turned control, bidirectional and invisible characters into escapes; only the SVG of `charts` goes in as markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from qarl.report.axes import curve_style
from qarl.report.blocks import BarChart, Block, Chart, LineChart, Scatter, Section, Table, Text
from qarl.report.charts import DARK_CURVES, LIGHT_CURVES, chart_note, svg
from qarl.report.figures import has_data, legend_names
from qarl.report.formatting import number
from qarl.storage.disk import write_together
from qarl.utils.text import visible

GENERATOR = '<meta name="generator" content="qarl">'  # by which we know a page that is ours to replace
SHOWN_CHARACTERS = 20_000  # of one prompt or completion
# A page says what it leaves out beyond these. A chart takes a tenth of a second and 10 kB; the legend of a chart with
# more curves would hide them.
CHARTS = 60  # per section
CURVES = 30  # per chart
BARS = 60  # per chart
ROWS = 1000  # per table


@dataclass
class _Group:
    """Charts that follow each other, or one other block."""

    kind: str
    block: Block | None = None
    charts: list[dict[str, Any]] = field(default_factory=list)


def render_page(title: str, subtitle: str, sections: list[Section]) -> str:
    """The page as HTML; the same arguments give the same text. Sections without blocks and intro are left out."""
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
    path: Path, title: str, subtitle: str, sections: list[Section], beside: Mapping[Path, bytes] | None = None
) -> Path:
    """Render to `path`, replacing it at once or not at all; returns it.

    beside: files that belong to the page, replaced together with it. Raises UserError if the disk refuses one of them;
    then all are as they were.
    """
    html = render_page(title, subtitle, sections)
    write_together({**(beside or {}), path: html.encode()}, "--out")
    return path


def bounded(sections: list[Section]) -> list[Section]:
    """The sections with at most `CHARTS` charts, `CURVES` curves or `BARS` bars per chart, and `ROWS` rows per table.

    A run's trackers and rewards may log thousands of metrics, and drawing them all takes minutes. The notes of charts
    and tables, and a text at the end of a section, say what was left out.
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
    # Safe as markup: `svg` builds an XML tree, so what is text in it is escaped text.
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
    """What jinja2 does to the value of every expression before it escapes it."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value.expandtabs(4), keep_newlines=True)
    return value


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]}\n… {len(text) - SHOWN_CHARACTERS:,} more characters"
