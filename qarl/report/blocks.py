"""Building blocks of a page. All content is untrusted plain text, escaped during rendering."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: Legend entry.
        x, y: Coordinates, of the same length. None, NaN or infinity in y leaves a gap.
        low, high: Bounds of y, of the same length, drawn as a band, or as error bars for a short series.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


@dataclass(frozen=True)
class LineChart:
    """Curves over a shared axis; labels include the unit. With log_y, values at or below 0 are gaps."""

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
    """Horizontal bars, because their labels may be long; the first is on top. y_label: Quantity and unit."""

    title: str
    y_label: str
    bars: list[Bar]
    note: str = ""


@dataclass(frozen=True)
class Histogram:
    """Histogram of values; non-finite values are omitted."""

    title: str
    x_label: str
    y_label: str
    values: list[float]
    note: str = ""


@dataclass(frozen=True)
class Points:
    """A class of points in a scatter plot; points with a non-finite coordinate are omitted."""

    name: str
    x: Sequence[float | None]
    y: Sequence[float | None]


@dataclass(frozen=True)
class Scatter:
    """Scatter plot; classes are drawn on top of each other in order.

    Attributes:
        diagonal: Draw y = x.
        band: (low, high) of y, shaded, with edges; None is open.
        line: A curve over the points, such as a mean.
        log_y: Logarithmic y axis; values at or below 0 are omitted.
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
    """Header of a column. help: tooltip."""

    name: str
    align: Literal["left", "right"] = "left"
    help: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text, one cell per column."""

    columns: list[Column]
    rows: list[list[str]]
    caption: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), (
                f"a row has {len(row)} cells, but the table has {len(self.columns)} columns: {row}"
            )


@dataclass(frozen=True)
class Facts:
    """(name, value) pairs."""

    items: list[tuple[str, str]]


@dataclass(frozen=True)
class Text:
    """A paragraph. kind: `plain`, `note` (smaller) or `warning` (highlighted)."""

    text: str
    kind: Literal["note", "warning", "plain"] = "plain"


@dataclass(frozen=True)
class Code:
    """Preformatted text. With a caption, it is collapsed by default."""

    text: str
    caption: str = ""


@dataclass(frozen=True)
class Completion:
    """A response of the model. details: one line on its origin (step, tokens, finish reason)."""

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
    """A marked part of a text with its context. details: one line on what and where it is."""

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
    """A heading and its blocks. Consecutive charts share a grid."""

    title: str
    blocks: list[Block]
    intro: str = ""
