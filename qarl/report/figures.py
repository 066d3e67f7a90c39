"""The matplotlib figure of a chart in given colours. Object API only: no pyplot, no global state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from qarl.report.axes import (
    STEPS,
    STYLES,
    Colours,
    TickText,
    axis_labels,
    curve_style,
    finite,
    linear_axis,
    log_axis,
    shortened,
)
from qarl.report.blocks import BarChart, Chart, Histogram, LineChart, Scatter, Series
from qarl.report.formatting import number
from qarl.report.scatter import drawable, scatter
from qarl.utils.text import visible

LEGEND_ROW = 0.2  # inches
WIDTH = 4.5  # inches; in a card of the page, a font size of 11 then renders at about 11 px
HEIGHT = 2.7
POINTS_WITH_MARKERS = 30
POINTS_WITH_BARS = 12
MAX_POINTS = 400

RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 11.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "text.parse_math": False,  # do not parse dollar signs in names
    "svg.fonttype": "none",
    "svg.hashsalt": "qarl",
}


def thin(series: Series) -> tuple[Series, int]:
    """Reduce `series` to at most MAX_POINTS points, each the mean of several values.

    A series without bounds gets the minimum and maximum of those values as bounds, so that peaks stay visible.

    Returns:
        The series, and the number of values per point (1: unchanged).
    """
    each = math.ceil(len(series.x) / MAX_POINTS)
    if each == 1 or not series.x:
        return series, 1

    def reduced(values: Sequence[float | None], by: Callable[[list[float]], float] = fmean) -> list[float]:
        parts = [[v for v in finite(values[i : i + each]) if not math.isnan(v)] for i in range(0, len(values), each)]
        return [by(part) if part else math.nan for part in parts]

    low = reduced(series.y, min) if series.low is None else reduced(series.low)
    high = reduced(series.y, max) if series.high is None else reduced(series.high)
    return Series(series.name, reduced(series.x), reduced(series.y), low, high), each


def legend_names(chart: Chart) -> list[str]:
    """Return the legend entries, in the order of the curves' styles."""
    if isinstance(chart, LineChart):
        return [series.name for series in chart.series]
    if isinstance(chart, Scatter):
        line = [chart.line.name] if chart.line is not None else []
        return [points.name for points in chart.points] + line
    return []


def draw(chart: Chart, colours: Colours, *, heading: bool) -> Figure:
    """Draw a chart. Call inside `rc_context(RC)`.

    Args:
        chart: The chart.
        colours: Colours.
        heading: Include title and legend, for a standalone picture.
    """
    height = HEIGHT
    if isinstance(chart, BarChart):
        height = 0.85 + 0.3 * max(1, len(chart.bars))
    names = [visible(name) for name in legend_names(chart)]
    legend = heading and len(names) > 1
    layout = ConstrainedLayoutEngine()
    if legend:  # up to four rows fit; more need a taller figure
        height += 0.2 + LEGEND_ROW * max(0, math.ceil(len(names) / _legend_columns(names)) - 4)
    figure = Figure((WIDTH, height + 0.35 * heading), layout=layout, facecolor=colours.background)
    axes = figure.add_subplot(facecolor=colours.background)
    layout.set(w_pad=0.05, h_pad=0.05)
    if isinstance(chart, LineChart):
        has_points = _lines(axes, chart, colours)
    elif isinstance(chart, BarChart):
        has_points = _bars(axes, chart, colours)
    elif isinstance(chart, Scatter):
        has_points = scatter(axes, chart, colours, log_scale(chart))
    else:
        has_points = _histogram(axes, chart, colours)
    if not has_points:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color=colours.muted, transform=axes.transAxes)
    if heading:
        figure.suptitle(shortened(chart.title, 48), x=0.02, ha="left", color=colours.text, fontweight="bold")
        if legend:
            _legend(figure, names, colours, len(chart.points) if isinstance(chart, Scatter) else 0)
    axes.tick_params(colors=colours.muted, labelcolor=colours.muted, labelsize=10.5)
    for spine in axes.spines.values():
        spine.set_color(colours.grid)
    return figure


def has_data(chart: Chart) -> bool:
    """Return whether there is a point to draw."""
    if isinstance(chart, LineChart):
        return any(not math.isnan(y) for s in chart.series for y in finite(s.y))
    if isinstance(chart, Scatter):
        return bool(drawable(chart, log_scale(chart)))
    values = [bar.value for bar in chart.bars] if isinstance(chart, BarChart) else chart.values
    return any(not math.isnan(v) for v in finite(values))


def log_scale(chart: LineChart | BarChart | Scatter) -> bool:
    """Return whether the axis is logarithmic: requested, and with a positive value."""
    if isinstance(chart, BarChart):
        values = [bar.value for bar in chart.bars]
    else:
        values = [y for part in (chart.series if isinstance(chart, LineChart) else chart.points) for y in part.y]
    return chart.log_y and any(v > 0 for v in finite(values))


def _lines(axes: Axes, chart: LineChart, colours: Colours) -> bool:
    log = log_scale(chart)
    shown: list[float] = []
    for index, series in enumerate(chart.series):
        series, _ = thin(series)
        colour_index, dash = curve_style(index, len(colours.curves))
        colour, style = colours.curves[colour_index], STYLES[dash]
        x, y = finite(series.x), finite(series.y)
        if log:
            y = [v if v > 0 else math.nan for v in y]
        points = [not math.isnan(v) for v in y]
        shown += [v for v in y if not math.isnan(v)]
        few = sum(points) <= POINTS_WITH_MARKERS
        width = 1.8 if len(x) <= 150 else 1.2
        axes.plot(x, y, color=colour, linestyle=style, linewidth=width, marker="o" if few else None, markersize=3.4)
        if not few:  # markers for points between two gaps, which have no line
            before, after = [False, *points[:-1]], [*points[1:], False]
            alone = [i for i, point in enumerate(points) if point and not before[i] and not after[i]]
            axes.plot([x[i] for i in alone], [y[i] for i in alone], "o", color=colour, markersize=3)
        if series.low is not None and series.high is not None:
            low, high = finite(series.low), finite(series.high)
            if log:
                low = [v if v > 0 else math.nan for v in low]
            if sum(points) <= POINTS_WITH_BARS:
                axes.vlines(x, low, high, color=colour, linewidth=1.2, alpha=0.7)
            else:
                axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    if not shown:
        return False
    if log:
        log_axis(axes, "y", shown)
    else:
        linear_axis(axes, shown)
    whole = all(float(v).is_integer() for series in chart.series for v in series.x)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS, integer=whole))
    axes.xaxis.set_major_formatter(TickText())
    axes.grid(axis="y", color=colours.grid, linewidth=0.8)
    axis_labels(axes, chart.x_label, chart.y_label, colours)
    return True


def _bars(axes: Axes, chart: BarChart, colours: Colours) -> bool:
    values = finite([bar.value for bar in chart.bars])
    if all(math.isnan(v) for v in values):
        return False
    log = log_scale(chart)
    rows = range(len(values))
    start = 10 ** math.floor(math.log10(min(v for v in values if v > 0)) - 0.3) if log else 0.0
    lengths = [v - start if not math.isnan(v) and (not log or v > 0) else 0.0 for v in values]
    axes.barh(rows, lengths, left=start, height=0.62, color=colours.curves[0])
    ends = list(values)
    for row, bar in enumerate(chart.bars):
        low, high = finite([bar.low, bar.high])
        if not math.isnan(low) and not math.isnan(high):
            axes.hlines(row, low, high, color=colours.text, linewidth=1.4)
            ends[row] = max(high, values[row])
    for row, end in enumerate(ends):
        text = number(chart.bars[row].value)
        x = start if math.isnan(end) or (log and end <= 0) else end if log else max(end, 0.0)
        axes.annotate(
            text,
            (x, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=colours.text,
            fontsize=10.5,
        )
    axes.set_yticks(rows, [shortened(bar.label, 28) for bar in chart.bars])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    if log:
        log_axis(axes, "x", [v for v in values if v > 0])
        axes.set_xlim(left=start)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
        axes.xaxis.set_major_formatter(TickText())
    axes.grid(axis="x", color=colours.grid, linewidth=0.8)
    # Right-aligned: long bar labels may leave an axis shorter than its own label, which then extends to the left.
    axes.set_xlabel(shortened(chart.y_label, 56), loc="right", color=colours.muted, fontsize=10.5)
    return True


def _histogram(axes: Axes, chart: Histogram, colours: Colours) -> bool:
    values = [v for v in finite(chart.values) if not math.isnan(v)]
    if not values:
        return False
    axes.hist(values, bins=chart.bins, color=colours.curves[0], linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(TickText())
    axes.grid(axis="y", color=colours.grid, linewidth=0.8)
    axis_labels(axes, chart.x_label, chart.y_label, colours)
    return True


def _legend(figure: Figure, names: list[str], colours: Colours, dots: int) -> None:
    """Draw the legend. dots: number of entries that are points; the others are curves."""
    handles = []
    for index in range(len(names)):
        colour, dash = curve_style(index, len(colours.curves))
        if index < dots:
            handles.append(Line2D([], [], color=colours.curves[colour], linestyle="", marker="o", markersize=4))
            continue
        handles.append(Line2D([], [], color=colours.curves[colour], linestyle=STYLES[dash]))
    # matplotlib omits names that start with an underscore; prepend an invisible thin space.
    labels = [
        shortened(name, 52).replace("_", "\u2009_", 1) if name.startswith("_") else shortened(name, 52)
        for name in names
    ]
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=_legend_columns(names),
        frameon=False,
        fontsize=10.5,
        labelcolor=colours.text,
    )


def _legend_columns(names: list[str]) -> int:
    longest = max(len(shortened(name, 52)) for name in names)
    return max(1, min(len(names), 56 // (longest + 6)))


def rc() -> AbstractContextManager[None]:
    """Apply the settings for drawing and saving charts, and restore the caller's afterwards."""
    return matplotlib.rc_context(RC)
