"""The matplotlib figure of a chart in given colours. Object API only: no pyplot, no global state."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullFormatter

from qarl.report.blocks import BarChart, Chart, Histogram, LineChart, Scatter, Series
from qarl.report.formatting import number
from qarl.utils.text import visible

# Once all colours are used, they repeat dashed, then dotted.
STYLES: tuple[Literal["-"] | tuple[float, tuple[float, float]], ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)))
STEPS = (1, 2, 5, 10)  # distance between ticks, times a power of ten
LEGEND_ROW = 0.2  # inches
WIDTH = 4.5  # inches; in a card of the page, a font size of 11 then renders at about 11 px
HEIGHT = 2.7
POINTS_WITH_MARKERS = 30
POINTS_WITH_BARS = 12
MAX_POINTS = 400
MAX_DOTS = 2500  # per class; a dot takes about 30 bytes of SVG
FEW_DOTS = 200  # up to this many dots are drawn larger
DOT_LAYERS = 6  # translucent layers per class, so that dense regions are darker

RC: dict[Any, Any] = {  # settings for drawing and saving
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


@dataclass(frozen=True)
class Colours:
    """Colours of a figure: curves in order of appearance, text, secondary text, grid, background."""

    curves: tuple[str, ...]
    text: str
    muted: str
    grid: str
    background: str


def curve_style(index: int, colours: int) -> tuple[int, int]:
    """Return (colour, dash) of a curve by index; the first `3 * colours` are all different."""
    return index % colours, index // colours % len(STYLES)


def finite(values: Sequence[float | None] | None) -> np.ndarray:
    """Return `values` as float64, with None and infinities replaced by NaN."""
    found = np.asarray([] if values is None else values, dtype=np.float64)  # None becomes NaN
    return np.where(np.isfinite(found), found, np.nan)


def thin(series: Series) -> tuple[Series, int]:
    """Reduce `series` to at most MAX_POINTS points, each the mean of several values.

    A series without bounds gets the minimum and maximum of those values as bounds, so that peaks stay visible.

    Returns:
        The series, and the number of values per point (1: unchanged).
    """
    each = math.ceil(len(series.x) / MAX_POINTS)
    if each <= 1:
        return series, 1

    def reduced(values: Sequence[float | None], by: Callable[[np.ndarray], float] = np.mean) -> list[float]:
        parts = np.split(finite(values), range(each, len(values), each))
        known = [part[~np.isnan(part)] for part in parts]
        return [float(by(part)) if len(part) else math.nan for part in known]

    low = reduced(series.y, np.min) if series.low is None else reduced(series.low)
    high = reduced(series.y, np.max) if series.high is None else reduced(series.high)
    return Series(series.name, reduced(series.x), reduced(series.y), low, high), each


def legend_names(chart: Chart) -> list[str]:
    """Return the legend entries, in the order of the curves' styles."""
    if isinstance(chart, LineChart):
        return [series.name for series in chart.series]
    if isinstance(chart, Scatter):
        line = [chart.line.name] if chart.line is not None else []
        return [points.name for points in chart.points] + line
    return []


def values_of(chart: Chart) -> list[np.ndarray]:
    """Return the values on the chart's value axis by curve or class; NaN for missing ones, as in `finite`."""
    if isinstance(chart, LineChart):
        return [finite(series.y) for series in chart.series]
    if isinstance(chart, Scatter):
        return [finite(points.y) for points in chart.points]
    return [finite([bar.value for bar in chart.bars] if isinstance(chart, BarChart) else chart.values)]


def log_scale(chart: Chart) -> bool:
    """Return whether the value axis is logarithmic: requested, and with a positive value."""
    return isinstance(chart, (LineChart, Scatter)) and chart.log_y and any((y > 0).any() for y in values_of(chart))


def has_data(chart: Chart) -> bool:
    """Return whether there is a point to draw."""
    if isinstance(chart, Scatter):
        return any(len(dots) for dots in _dots(chart, log_scale(chart)))
    return any(not np.isnan(values).all() for values in values_of(chart))


def draw(chart: Chart, colours: Colours, *, heading: bool) -> Figure:
    """Draw a chart. Call inside `matplotlib.rc_context(RC)`.

    Args:
        chart: The chart.
        colours: Colours.
        heading: Include title and legend, for a standalone picture.
    """
    height = 0.85 + 0.3 * max(1, len(chart.bars)) if isinstance(chart, BarChart) else HEIGHT
    names = [visible(name) for name in legend_names(chart)]
    legend = heading and len(names) > 1
    layout = ConstrainedLayoutEngine()
    if legend:  # up to four rows fit; more need a taller figure
        height += 0.2 + LEGEND_ROW * max(0, math.ceil(len(names) / _legend_columns(names)) - 4)
    figure = Figure((WIDTH, height + 0.35 * heading), layout=layout, facecolor=colours.background)
    axes = figure.add_subplot(facecolor=colours.background)
    layout.set(w_pad=0.05, h_pad=0.05)
    if not has_data(chart):
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color=colours.muted, transform=axes.transAxes)
    elif isinstance(chart, LineChart):
        _lines(axes, chart, colours)
    elif isinstance(chart, BarChart):
        _bars(axes, chart, colours)
    elif isinstance(chart, Scatter):
        _scatter(axes, chart, colours)
    else:
        _histogram(axes, chart, colours)
    if heading:
        figure.suptitle(shortened(chart.title, 48), x=0.02, ha="left", color=colours.text, fontweight="bold")
        if legend:
            _legend(figure, names, colours, len(chart.points) if isinstance(chart, Scatter) else 0)
    axes.tick_params(colors=colours.muted, labelcolor=colours.muted, labelsize=10.5)
    for spine in axes.spines.values():
        spine.set_color(colours.grid)
    return figure


def _lines(axes: Axes, chart: LineChart, colours: Colours) -> None:
    log = log_scale(chart)
    shown: list[np.ndarray] = []
    for index, series in enumerate(chart.series):
        series, _ = thin(series)
        colour_index, dash = curve_style(index, len(colours.curves))
        colour, style = colours.curves[colour_index], STYLES[dash]
        x, y = finite(series.x), _on_axis(finite(series.y), log)
        points = ~np.isnan(y)
        shown.append(y[points])
        few = points.sum() <= POINTS_WITH_MARKERS
        width = 1.8 if len(x) <= 150 else 1.2
        axes.plot(x, y, color=colour, linestyle=style, linewidth=width, marker="o" if few else None, markersize=3.4)
        if not few:  # markers for points between two gaps, which have no line
            beside = np.pad(points, 1)
            alone = points & ~beside[:-2] & ~beside[2:]
            axes.plot(x[alone], y[alone], "o", color=colour, markersize=3)
        if series.low is not None and series.high is not None:
            low, high = _on_axis(finite(series.low), log), finite(series.high)
            if points.sum() <= POINTS_WITH_BARS:
                axes.vlines(x, low, high, color=colour, linewidth=1.2, alpha=0.7)
            else:
                axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    (_log_axis if log else _linear_axis)(axes, np.concatenate(shown))
    whole = all(float(v).is_integer() for series in chart.series for v in series.x)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS, integer=whole))
    axes.xaxis.set_major_formatter(TickText())
    axes.grid(axis="y", color=colours.grid, linewidth=0.8)
    _axis_labels(axes, chart.x_label, chart.y_label, colours)


def _bars(axes: Axes, chart: BarChart, colours: Colours) -> None:
    (values,) = values_of(chart)
    rows = range(len(values))
    axes.barh(rows, np.nan_to_num(values), height=0.62, color=colours.curves[0])
    ends = list(values)
    for row, bar in enumerate(chart.bars):
        low, high = finite([bar.low, bar.high])
        if not math.isnan(low) and not math.isnan(high):
            axes.hlines(row, low, high, color=colours.text, linewidth=1.4)
            ends[row] = max(high, values[row])
    for row, end in enumerate(ends):
        x = 0.0 if math.isnan(end) else max(end, 0.0)
        beside: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(number(chart.bars[row].value), (x, row), color=colours.text, fontsize=10.5, **beside)
    axes.set_yticks(rows, [shortened(bar.label, 28) for bar in chart.bars])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    if not np.nan_to_num(values).any():  # otherwise bars of 0 are drawn in the middle of [-0.05, 0.05]
        axes.set_xlim(0.0, 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    axes.xaxis.set_major_formatter(TickText())
    axes.grid(axis="x", color=colours.grid, linewidth=0.8)
    # Right-aligned: long bar labels may leave an axis shorter than its own label, which then extends to the left.
    axes.set_xlabel(shortened(chart.y_label, 56), loc="right", color=colours.muted, fontsize=10.5)


def _histogram(axes: Axes, chart: Histogram, colours: Colours) -> None:
    (values,) = values_of(chart)
    axes.hist(values[~np.isnan(values)], bins=30, color=colours.curves[0], linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(TickText())
    axes.grid(axis="y", color=colours.grid, linewidth=0.8)
    _axis_labels(axes, chart.x_label, chart.y_label, colours)


def _scatter(axes: Axes, chart: Scatter, colours: Colours) -> None:
    """Draw many small dots, with the band, the diagonal and the line of the chart."""
    log = log_scale(chart)
    classes = _dots(chart, log)
    shown = np.concatenate(classes)
    across, values = shown.T
    if log:
        _log_axis(axes, values)
    for edge in chart.band or ():
        if edge is not None:
            axes.axhline(edge, color=colours.muted, linewidth=0.9, linestyle=STYLES[1], zorder=1.5)
    if chart.band is not None:  # an open end extends to the outermost point
        low, high = (end if edge is None else edge for edge, end in zip(chart.band, _ends(values), strict=True))
        if high > low:
            axes.axhspan(low, high, color=colours.grid, alpha=0.35, linewidth=0, zorder=0.5)
    if chart.diagonal:
        ends = shown.min(1).min(), shown.max(1).max()
        axes.plot(ends, ends, color=colours.muted, linewidth=0.9, zorder=1.5)
    length = 1e-3 * float(np.ptp(across)) or 1e-3
    for index, dots in enumerate(classes):
        colour = colours.curves[curve_style(index, len(colours.curves))[0]]
        dots = dots[:: math.ceil(len(dots) / MAX_DOTS) or 1]
        few = len(shown) <= FEW_DOTS or len(dots) <= 0.02 * len(shown)  # a rare class stands out, too
        width, alpha = (4.0, 0.75) if few else (2.6, 0.5)
        for layer in range(DOT_LAYERS):
            _strokes(axes, dots[layer::DOT_LAYERS], length, colour, width, alpha)
    axes.update_datalim(shown)
    axes.autoscale_view()
    if chart.line is not None:
        which, dash = curve_style(len(chart.points), len(colours.curves))
        x, y = finite(chart.line.x), _on_axis(finite(chart.line.y), log)
        axes.plot(x, y, color=colours.curves[which], linestyle=STYLES[dash], marker="o", markersize=3.4, zorder=3)
    if not log:
        _linear_axis(axes, values)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.xaxis.set_major_formatter(TickText())
    axes.grid(axis="both", color=colours.grid, linewidth=0.8)
    _axis_labels(axes, chart.x_label, chart.y_label, colours)


def _dots(chart: Scatter, log: bool) -> list[np.ndarray]:
    """Return the drawable points of each class, (N, 2)."""
    every = [np.stack([finite(points.x), _on_axis(finite(points.y), log)], axis=1) for points in chart.points]
    return [dots[~np.isnan(dots).any(1)] for dots in every]


def _strokes(axes: Axes, dots: np.ndarray, length: float, colour: str, width: float, alpha: float) -> None:
    """Draw dots as strokes of almost no length with round caps: one SVG path, instead of one element per marker."""
    if not len(dots):
        return
    ends = np.stack([dots, dots + np.array((length, 0.0))], axis=1).reshape(-1, 2)
    outline = Outline(ends, [Outline.MOVETO, Outline.LINETO] * len(dots))
    outline.should_simplify = False  # simplification would drop such short strokes
    axes.add_patch(
        PathPatch(outline, fill=False, edgecolor=colour, capstyle="round", linewidth=width, alpha=alpha, snap=False)
    )


def _on_axis(values: np.ndarray, log: bool) -> np.ndarray:
    """Replace the values that a logarithmic axis cannot show by NaN."""
    return np.where(values > 0, values, np.nan) if log else values


def _ends(values: np.ndarray) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _linear_axis(axes: Axes, shown: np.ndarray) -> None:
    low, high = _ends(shown)
    if low == high == 0:
        axes.set_ylim(-0.06, 1)  # a flat line at the bottom, not in the middle of an arbitrary range
    elif high - low <= 1e-9 * max(abs(low), abs(high)):
        axes.set_ylim(low - 0.1 * abs(low), high + 0.1 * abs(high))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    axes.yaxis.set_major_formatter(TickText())


def _log_axis(axes: Axes, shown: np.ndarray) -> None:
    axis = axes.yaxis
    axes.set_yscale("log")
    low, high = _ends(shown)
    axis.set_major_locator(LogLocator(numticks=6, subs=(1.0,) if math.log10(high / low) > 2 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(TickText())
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)


def _axis_labels(axes: Axes, x_label: str, y_label: str, colours: Colours) -> None:
    """Set axis labels. The y label is horizontal, above the axis: easier to read, and takes no width."""
    axes.set_xlabel(shortened(x_label, 56), color=colours.muted, fontsize=10.5)
    # The fixed y skips matplotlib's search for a free position.
    axes.set_title(shortened(y_label, 56), loc="left", y=1.0, color=colours.muted, fontsize=10.5)


def _legend(figure: Figure, names: list[str], colours: Colours, dots: int) -> None:
    """Draw the legend. dots: number of entries that are points; the others are curves."""
    handles = []
    for index in range(len(names)):
        colour, dash = curve_style(index, len(colours.curves))
        point: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 4}
        how = point if index < dots else {"linestyle": STYLES[dash]}
        handles.append(Line2D([], [], color=colours.curves[colour], **how))
    # matplotlib omits names that start with an underscore; prepend an invisible thin space.
    labels = ["\u2009" * name.startswith("_") + shortened(name, 52) for name in names]
    columns = _legend_columns(names)
    style: dict[str, Any] = {"frameon": False, "fontsize": 10.5, "labelcolor": colours.text}
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, **style)


def _legend_columns(names: list[str]) -> int:
    longest = max(len(shortened(name, 52)) for name in names)
    return max(1, min(len(names), 56 // (longest + 6)))


def shortened(text: str, length: int) -> str:
    text = visible(text)
    return text if len(text) <= length else text[: length - 1] + "…"


class TickText(Formatter):
    """Tick formatter with as many digits as needed to tell the ticks apart, the same number for all."""

    _ticks: tuple[float, ...] = ()

    def set_locs(self, locs: Sequence[float]) -> None:
        self._ticks = tuple(locs)

    def __call__(self, x: float, pos: int | None = None) -> str:
        steps = [b - a for a, b in pairwise(self._ticks) if b > a]
        largest = max((abs(v) for v in self._ticks), default=abs(x))
        if x == 0:
            return "0"
        if isinstance(self.axis, Axis) and self.axis.get_scale() == "log":
            # One digit distinguishes decades; an axis of less than a decade may need more.
            digits = next((d for d in (1, 2, 3) if len({number(v, d) for v in self._ticks}) == len(self._ticks)), 3)
            return number(x, digits) if 1e-3 <= abs(x) < 1e5 else f"{x:.{digits - 1}e}"
        step = min(steps, default=abs(x))
        power = 6 if largest >= 1e6 else math.floor(math.log10(largest)) if largest < 1e-3 else 0
        digits = next((d for d in range(12) if math.isclose(round(step / 10**power, d), step / 10**power)), 12)
        text = f"{x / 10**power:,.{digits}f}"
        return text + "M" if power == 6 else f"{text}e{power:03}" if power else text
