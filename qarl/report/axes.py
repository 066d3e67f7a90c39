"""Colours, axes and ticks shared by all charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullFormatter

from qarl.report.formatting import number
from qarl.utils.text import visible

STYLES: tuple[Literal["-"] | tuple[float, tuple[float, float]], ...] = (
    "-",
    (0, (5, 1.6)),
    (0, (1.2, 1.4)),
)  # once all colours are used, repeat them dashed, then dotted
STEPS = (1, 2, 5, 10)  # distance between ticks, times a power of ten


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


def finite(values: Sequence[float | None] | None) -> list[float]:
    """Return `values` with None and infinities replaced by NaN."""
    return [v if v is not None and math.isfinite(v) else math.nan for v in values or ()]


def linear_axis(axes: Axes, shown: list[float]) -> None:
    low, high = min(shown), max(shown)
    if low == high == 0:
        axes.set_ylim(-0.06, 1)  # a flat line at the bottom, not in the middle of an arbitrary range
    elif high - low <= 1e-9 * max(abs(low), abs(high)):
        axes.set_ylim(low - 0.1 * abs(low), high + 0.1 * abs(high))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    axes.yaxis.set_major_formatter(TickText())


def log_axis(axes: Axes, which: str, shown: list[float]) -> None:
    axis = axes.yaxis if which == "y" else axes.xaxis
    (axes.set_yscale if which == "y" else axes.set_xscale)("log")
    decades = math.log10(max(shown) / min(shown))
    axis.set_major_locator(LogLocator(numticks=6, subs=(1.0,) if decades > 2 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(TickText())
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)


def axis_labels(axes: Axes, x_label: str, y_label: str, colours: Colours) -> None:
    """Set axis labels. The y label is horizontal, above the axis: easier to read, and takes no width."""
    axes.set_xlabel(shortened(x_label, 56), color=colours.muted, fontsize=10.5)
    axes.set_title(
        shortened(y_label, 56), loc="left", y=1.0, color=colours.muted, fontsize=10.5
    )  # fixed y, which skips matplotlib's search for a free position


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
