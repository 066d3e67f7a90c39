"""Colours, axes and ticks that all charts share."""

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
)  # after all colours are used once, dashes; then dots
STEPS = (1, 2, 5, 10)  # between ticks


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


def linear_axis(axes: Axes, shown: list[float]) -> None:
    low, high = min(shown), max(shown)
    if low == high == 0:
        axes.set_ylim(-0.06, 1)  # a flat line at 0, not in the middle of invented digits
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
    """The label of y lies flat above the axis: it costs no width, and nobody tilts their head."""
    axes.set_xlabel(shortened(x_label, 56), color=colours.muted, fontsize=10.5)
    axes.set_title(
        shortened(y_label, 56), loc="left", y=1.0, color=colours.muted, fontsize=10.5
    )  # y: no search for one


def shortened(text: str, length: int) -> str:
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
        if isinstance(self.axis, Axis) and self.axis.get_scale() == "log":
            # One digit tells the ticks of decades apart; an axis of less than one may take more.
            digits = next((d for d in (1, 2, 3) if len({number(v, d) for v in self._ticks}) == len(self._ticks)), 3)
            return number(x, digits) if 1e-3 <= abs(x) < 1e5 else f"{x:.{digits - 1}e}"
        step = min(steps, default=abs(x))
        power = 6 if largest >= 1e6 else math.floor(math.log10(largest)) if largest < 1e-3 else 0
        digits = next((d for d in range(12) if math.isclose(round(step / 10**power, d), step / 10**power)), 12)
        text = f"{x / 10**power:,.{digits}f}"
        return text + "M" if power == 6 else f"{text}e{power:03}" if power else text
