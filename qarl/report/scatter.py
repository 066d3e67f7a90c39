"""Scatter plots: many small dots with a band, a diagonal or a mean."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
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
)
from qarl.report.blocks import Scatter

MAX_DOTS = 2500  # per class; a dot takes about 30 bytes of SVG
FEW_DOTS = 200  # up to this many dots are drawn larger
DOT_LAYERS = 6  # translucent layers per class, so that dense regions are darker


def scatter(axes: Axes, chart: Scatter, colours: Colours, log: bool) -> bool:
    """Draw a scatter plot. Return False, drawing nothing, if there are no points. log: logarithmic y axis."""
    classes = drawable(chart, log)
    shown = [dot for _, dots in classes for dot in dots]
    if not shown:
        return False
    values = [y for _, y in shown]
    if log:
        log_axis(axes, "y", values)
    for edge in chart.band or ():
        if edge is not None:
            axes.axhline(edge, color=colours.muted, linewidth=0.9, linestyle=STYLES[1], zorder=1.5)
    if chart.band is not None:
        _shade(axes, chart.band, values, colours)
    if chart.diagonal:
        ends = min(min(dot) for dot in shown), max(max(dot) for dot in shown)
        axes.plot(ends, ends, color=colours.muted, linewidth=0.9, zorder=1.5)
    across = [x for x, _ in shown]
    length = 1e-3 * (max(across) - min(across)) or 1e-3
    for index, dots in classes:
        colour = colours.curves[curve_style(index, len(colours.curves))[0]]
        dots = dots[:: math.ceil(len(dots) / MAX_DOTS)]
        few = len(shown) <= FEW_DOTS or len(dots) <= 0.02 * len(shown)  # a rare class stands out, too
        width, alpha = (4.0, 0.75) if few else (2.6, 0.5)
        for layer in range(DOT_LAYERS):
            _strokes(axes, dots[layer::DOT_LAYERS], length, colour, width, alpha)
    axes.update_datalim(shown)
    axes.autoscale_view()
    if chart.line is not None:
        which, dash = curve_style(len(chart.points), len(colours.curves))
        x, y = finite(chart.line.x), finite(chart.line.y)
        y = [v if not log or v > 0 else math.nan for v in y]
        axes.plot(x, y, color=colours.curves[which], linestyle=STYLES[dash], marker="o", markersize=3.4, zorder=3)
    if not log:
        linear_axis(axes, values)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.xaxis.set_major_formatter(TickText())
    axes.grid(axis="both", color=colours.grid, linewidth=0.8)
    axis_labels(axes, chart.x_label, chart.y_label, colours)
    return True


def _strokes(
    axes: Axes, dots: list[tuple[float, float]], length: float, colour: str, width: float, alpha: float
) -> None:
    """Draw near-zero-length strokes with round caps: a single path, where markers would be one element each."""
    if not dots:
        return
    ends = [end for x, y in dots for end in ((x, y), (x + length, y))]
    outline = Outline(ends, [Outline.MOVETO, Outline.LINETO] * len(dots))
    outline.should_simplify = False  # simplification would drop such short strokes
    axes.add_patch(
        PathPatch(outline, fill=False, edgecolor=colour, capstyle="round", linewidth=width, alpha=alpha, snap=False)
    )


def drawable(chart: Scatter, log: bool) -> list[tuple[int, list[tuple[float, float]]]]:
    """Return (index of the class, its drawable points) for classes that have any."""
    found = []
    for index, points in enumerate(chart.points):
        pairs = zip(finite(points.x), finite(points.y), strict=True)
        dots = [(x, y) for x, y in pairs if not math.isnan(x) and not math.isnan(y) and (not log or y > 0)]
        if dots:
            found.append((index, dots))
    return found


def _shade(axes: Axes, band: tuple[float | None, float | None], values: list[float], colours: Colours) -> None:
    """Fill the band; an open end extends to the outermost point."""
    low, high = band
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    if high > low:
        axes.axhspan(low, high, color=colours.grid, alpha=0.35, linewidth=0, zorder=0.5)
