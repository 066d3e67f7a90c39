"""Building blocks of a page. All content is untrusted plain text, escaped during rendering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Series:
    """One curve. A y of None, NaN or infinity leaves a gap.

    low, high: bounds of y, of the same length; drawn as a band, or as error bars where the series is short.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


@dataclass(frozen=True)
class LineChart:
    """Curves over a shared axis; labels carry the unit. log_y: values at or below 0 are gaps."""

    title: str
    x_label: str
    y_label: str
    series: list[Series]
    log_y: bool = False
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar; low and high are the ends of its interval. A value of None or NaN leaves an empty row."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars, the first on top, so that long labels have room. y_label: what the length is, with its unit."""

    title: str
    y_label: str
    bars: list[Bar]
    note: str = ""
    log_y: bool = False


@dataclass(frozen=True)
class Histogram:
    """How often values occur; those that are not finite are left out."""

    title: str
    x_label: str
    y_label: str
    values: list[float]
    bins: int = 30
    note: str = ""


@dataclass(frozen=True)
class Points:
    """A class of points in a scatter; those with a coordinate that is None, NaN or infinite are left out."""

    name: str
    x: Sequence[float | None]
    y: Sequence[float | None]


@dataclass(frozen=True)
class Scatter:
    """Points, the classes drawn one over the other in their order.

    diagonal: draw y = x. band: (low, high) of y, shaded, with edges; None is open. line: a curve over the points,
    such as a mean. log_y: values at or below 0 are left out.
    """

    title: str
    x_label: str
    y_label: str
    points: list[Points]
    diagonal: bool = False
    band: tuple[float | None, float | None] | None = None
    line: Series | None = None
    log_y: bool = False
    note: str = ""


Chart = LineChart | BarChart | Histogram | Scatter


@dataclass(frozen=True)
class Column:
    """A column's head. help: shown when the pointer rests on it."""

    name: str
    align: Literal["left", "right"] = "left"
    help: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text, one cell a column."""

    columns: list[Column]
    rows: list[list[str]]
    caption: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{len(row)} cells in a table of {len(self.columns)} columns: {row}"


@dataclass(frozen=True)
class Facts:
    """(name, value) pairs."""

    items: list[tuple[str, str]]


@dataclass(frozen=True)
class Text:
    """A paragraph. kind: `plain`; `note`, set smaller; `warning`, set apart."""

    text: str
    kind: Literal["note", "warning", "plain"] = "plain"


@dataclass(frozen=True)
class Code:
    """Preformatted text. caption: given one, the text is folded behind it."""

    text: str
    caption: str = ""


@dataclass(frozen=True)
class Completion:
    """What a model answered. details: one line on where it is from (step, tokens, finish reason)."""

    prompt: str
    completion: str
    reward: float | None
    details: str = ""


@dataclass(frozen=True)
class Completions:
    items: list[Completion]
    note: str = ""


@dataclass(frozen=True)
class Excerpt:
    """A stretch of a text that is marked, and what stands around it. details: one line on what and where it is."""

    before: str
    marked: str
    after: str
    details: str


@dataclass(frozen=True)
class Excerpts:
    items: list[Excerpt]
    note: str = ""


Block = LineChart | BarChart | Histogram | Scatter | Table | Facts | Text | Code | Completions | Excerpts


@dataclass(frozen=True)
class Section:
    """A heading and its blocks. Charts that follow each other share a grid."""

    title: str
    blocks: list[Block]
    intro: str = ""
