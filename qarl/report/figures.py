"""The matplotlib figure of a chart, in a given set of colours. Object API only: no pyplot, no global figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullFormatter

from qarl.report.blocks import BarChart, Chart, Histogram, LineChart, Series
from qarl.report.formatting import number
from qarl.text import visible

WIDTH = 4.5  # inches of 72 units: in a card of the page a font size of 11 comes out as about 11 px
HEIGHT = 2.7
STYLES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)))  # after all colours are used once, dashes; then dots
STEPS = (1, 2, 5, 10)  # between ticks
POINTS_WITH_MARKERS = 30
POINTS_WITH_BARS = 12
MAX_POINTS = 400

RC = {
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
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.fonttype": "none",
    "svg.hashsalt": "qarl",
}


@dataclass(frozen=True)
class Colours:
    """What a figure is drawn in: curves in order of appearance, text, secondary text, grid, background."""

    curves: tuple[str, ...]
    text: str
    muted: str
    grid: str
    background: str


def curve_style(index: int, colours: int) -> tuple[int, int]:
    """(colour, dash) of the curve of that index: no two of the first `3 * colours` look alike."""
    return index % colours, index // colours % len(STYLES)


def finite(values: Sequence[float | None] | None) -> list[float]:
    """`values` with what cannot be drawn as NaN."""
    return [v if v is not None and math.isfinite(v) else math.nan for v in values or ()]


def thin(series: Series) -> tuple[Series, int]:
    """`series` with at most MAX_POINTS points, and how many values each is the mean of (1: untouched).

    Without bounds of its own, the lowest and the highest of those values become them, so that no peak is lost.
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


def draw(chart: Chart, colours: Colours, *, heading: bool) -> Figure:
    """heading: title and legend in the figure, for a picture that stands alone. Call inside `rc_context(RC)`."""
    height = HEIGHT
    if isinstance(chart, BarChart):
        height = 0.85 + 0.3 * max(1, len(chart.bars))
    names = [visible(s.name) for s in chart.series] if isinstance(chart, LineChart) else []
    legend = heading and len(names) > 1
    figure = Figure((WIDTH, height + 0.35 * heading + 0.2 * legend), layout="constrained", facecolor=colours.background)
    axes = figure.add_subplot(facecolor=colours.background)
    figure.get_layout_engine().set(w_pad=0.05, h_pad=0.05)
    if isinstance(chart, LineChart):
        drawn = _lines(axes, chart, colours)
    elif isinstance(chart, BarChart):
        drawn = _bars(axes, chart, colours)
    else:
        drawn = _histogram(axes, chart, colours)
    if not drawn:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color=colours.muted, transform=axes.transAxes)
    if heading:
        figure.suptitle(_cut(chart.title, 48), x=0.02, ha="left", color=colours.text, fontweight="bold")
        if legend:
            _legend(figure, names, colours)
    axes.tick_params(colors=colours.muted, labelcolor=colours.muted, labelsize=10.5)
    for spine in axes.spines.values():
        spine.set_color(colours.grid)
    return figure


def has_data(chart: Chart) -> bool:
    """Whether there is a point to draw."""
    if isinstance(chart, LineChart):
        return any(not math.isnan(y) for s in chart.series for y in finite(s.y))
    values = [bar.value for bar in chart.bars] if isinstance(chart, BarChart) else chart.values
    return any(not math.isnan(v) for v in finite(values))


def log_scale(chart: LineChart | BarChart) -> bool:
    """Whether the axis is logarithmic: asked for, and with a positive value to show."""
    values = [y for s in chart.series for y in s.y] if isinstance(chart, LineChart) else [b.value for b in chart.bars]
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
        if not few:  # a point between two gaps is no line
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
        _log_axis(axes, "y", shown)
    else:
        _linear_axis(axes, shown)
    whole = all(float(v).is_integer() for series in chart.series for v in series.x)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS, integer=whole))
    axes.xaxis.set_major_formatter(TickText())
    axes.grid(axis="y", color=colours.grid, linewidth=0.8)
    _labels(axes, chart.x_label, chart.y_label, colours)
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
        place = start if math.isnan(end) or (log and end <= 0) else end if log else max(end, 0.0)
        axes.annotate(text, (place, row), xytext=(4, 0), textcoords="offset points", va="center",
                      color=colours.text, fontsize=10.5)  # fmt: skip
    axes.set_yticks(rows, [_cut(bar.label, 28) for bar in chart.bars])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    if log:
        _log_axis(axes, "x", [v for v in values if v > 0])
        axes.set_xlim(left=start)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
        axes.xaxis.set_major_formatter(TickText())
    axes.grid(axis="x", color=colours.grid, linewidth=0.8)
    # Flush right: long bar labels leave an axis too short for its own label, which then runs out to the left.
    axes.set_xlabel(_cut(chart.y_label, 56), loc="right", color=colours.muted, fontsize=10.5)
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
    _labels(axes, chart.x_label, chart.y_label, colours)
    return True


def _linear_axis(axes: Axes, shown: list[float]) -> None:
    low, high = min(shown), max(shown)
    if low == high == 0:
        axes.set_ylim(-0.06, 1)  # a flat line at 0, not in the middle of invented digits
    elif high - low <= 1e-9 * max(abs(low), abs(high)):
        axes.set_ylim(low - 0.1 * abs(low), high + 0.1 * abs(high))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    axes.yaxis.set_major_formatter(TickText())


def _log_axis(axes: Axes, which: str, shown: list[float]) -> None:
    axis = axes.yaxis if which == "y" else axes.xaxis
    (axes.set_yscale if which == "y" else axes.set_xscale)("log")
    decades = math.log10(max(shown) / min(shown))
    axis.set_major_locator(LogLocator(numticks=6, subs=(1.0,) if decades > 2 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(TickText())
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)


def _labels(axes: Axes, x_label: str, y_label: str, colours: Colours) -> None:
    """The label of y lies flat above the axis: it costs no width, and nobody tilts their head."""
    axes.set_xlabel(_cut(x_label, 56), color=colours.muted, fontsize=10.5)
    axes.set_title(_cut(y_label, 56), loc="left", color=colours.muted, fontsize=10.5)


def _legend(figure: Figure, names: list[str], colours: Colours) -> None:
    handles = []
    for index in range(len(names)):
        colour, dash = curve_style(index, len(colours.curves))
        handles.append(Line2D([], [], color=colours.curves[colour], linestyle=STYLES[dash]))
    # matplotlib leaves out names that start with an underscore; a thin space before it is not seen.
    labels = [_cut(name, 52).replace("_", "\u2009_", 1) if name.startswith("_") else _cut(name, 52) for name in names]
    columns = max(1, min(len(names), 56 // (max(map(len, labels)) + 6)))
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, fontsize=10.5,
                  labelcolor=colours.text)  # fmt: skip


def _cut(text: str, length: int) -> str:
    text = visible(text)
    return text if len(text) <= length else text[: length - 1] + "…"


class TickText(Formatter):
    """As many digits as tell the ticks apart, and the same number at all of them."""

    _ticks: tuple[float, ...] = ()

    def set_locs(self, locs: Sequence[float]) -> None:
        self._ticks = tuple(locs)

    def __call__(self, x: float, pos: int | None = None) -> str:
        steps = [b - a for a, b in pairwise(self._ticks) if b > a]
        largest = max((abs(v) for v in self._ticks), default=abs(x))
        if x == 0:
            return "0"
        if self.axis is not None and self.axis.get_scale() == "log":
            return number(x, 1) if 1e-3 <= abs(x) < 1e5 else f"{x:.0e}"
        step = min(steps, default=abs(x))
        power = 6 if largest >= 1e6 else math.floor(math.log10(largest)) if largest < 1e-3 else 0
        digits = next((d for d in range(12) if math.isclose(round(step / 10**power, d), step / 10**power)), 12)
        text = f"{x / 10**power:,.{digits}f}"
        return text + "M" if power == 6 else f"{text}e{power:03}" if power else text


def rc() -> object:
    """The settings in force while a chart is drawn and written; those of the calling program come back."""
    return matplotlib.rc_context(RC)
