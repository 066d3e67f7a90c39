"""Charts as SVG for the page, and as PNG.

The SVG refers to colours by name (`var(--curve-0)`, `var(--text)`), so one drawing fits light and dark mode. Its text
stays text. Drawing a chart twice gives the same bytes.
"""

import io
import math
import re
import warnings
import xml.etree.ElementTree as ET

import matplotlib
import numpy as np

from qarl.report.blocks import Chart, LineChart, Scatter
from qarl.report.drawing import MAX_DOTS, RC, Colours, draw, finite, log_scale, thin, values_of
from qarl.utils.text import visible

# Okabe-Ito colours, distinguishable with common colour blindness; darkened to 3:1 on white, lightened on black.
LIGHT_CURVES = ("#0072b2", "#c14f00", "#00805c", "#a3508a", "#8f6b00", "#2687bd", "#6b6b6b")
DARK_CURVES = ("#56b4e9", "#f0803c", "#2fc79a", "#e19ac6", "#e9b93b", "#a5c8f0", "#b5b5b5")
_PICTURE = Colours(LIGHT_CURVES, "#1b1f24", "#57606a", "#d5dae0", "#ffffff")

# Placeholders that are replaced by variables in the SVG; matplotlib does not accept `var()`.
_STAND_INS = Colours(
    tuple(f"#a1b2{index:02x}" for index in range(len(LIGHT_CURVES))), "#a1b2f0", "#a1b2f1", "#a1b2f2", "none"
)
_VARIABLES = {colour: f"var(--curve-{index})" for index, colour in enumerate(_STAND_INS.curves)} | {
    _STAND_INS.text: "var(--text)",
    _STAND_INS.muted: "var(--muted)",
    _STAND_INS.grid: "var(--grid)",
}
FORMS = ("svg", "png")
# (id of a chart, format) -> bytes rendered by `qarl.report.parallel_render`
rendered: dict[tuple[int, str], bytes] = {}

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ET.register_namespace("", _SVG)
ET.register_namespace("xlink", _XLINK)


def svg(chart: Chart, prefix: str = "chart-") -> str:
    """Render the chart as an <svg> element without title and legend, which the page sets as text.

    Args:
        chart: The chart.
        prefix: Prefix of all ids in it; must be unique on a page.
    """
    root = ET.fromstring(_bytes(chart, "svg"))
    root.attrib.pop("width")
    root.attrib.pop("height")
    root.set("role", "img")
    for element in (*root.findall(f"{{{_SVG}}}metadata"), *root.findall(f"{{{_SVG}}}defs[{{{_SVG}}}style]")):
        root.remove(element)  # its style sheet would apply to the whole page
    title = ET.Element(f"{{{_SVG}}}title")
    title.text = visible(chart.title)
    root.insert(0, title)
    for element in root.iter():
        for name, value in element.attrib.items():
            element.set(name, _attribute(name, value, prefix))
    return ET.tostring(root, encoding="unicode")


def png(chart: Chart) -> bytes:
    """Render the chart with title and legend, in light colours, at 150 dpi."""
    return _bytes(chart, "png")


def file_name(chart: Chart) -> str:
    """Return the name of the chart's PNG file, made from its title."""
    return f"{re.sub(r'[^a-z0-9]+', '_', chart.title.lower()).strip('_')[:80] or 'chart'}.png"


def chart_note(chart: Chart) -> str:
    """Return the chart's note, plus which values were omitted or averaged."""
    parts = [chart.note] if chart.note else []
    if isinstance(chart, LineChart):
        each = max((thin(series)[1] for series in chart.series), default=1)
        if each > 1:
            bounded = any(series.low is not None for series in chart.series)
            band = "" if bounded else ", in a band from the lowest to the highest"
            parts.append(f"Each point is the mean of {each} consecutive values{band}.")
    if isinstance(chart, (LineChart, Scatter)) and chart.log_y:
        count = sum(int((y <= 0).sum()) for y in values_of(chart))
        if not log_scale(chart):
            parts.append("No value above 0, so the axis is linear.")
        elif count:
            parts.append(f"{_counted(count, chart)} at 0 or below, which a log axis cannot show.")
    if isinstance(chart, Scatter):
        count = sum(int(np.isnan(finite(points.x) + finite(points.y)).sum()) for points in chart.points)
        if count:
            parts.append(f"{_counted(count, chart)} without a finite value left out.")
        each = max((math.ceil(len(points.x) / MAX_DOTS) for points in chart.points), default=1)
        if each > 1:
            parts.append(f"One point in {each} of the largest class is drawn.")
    return " ".join(parts)


def _counted(count: int, chart: LineChart | Scatter) -> str:
    """Return `1 value` for a curve, `1,200 points` for a scatter plot."""
    return f"{count:,} {'value' if isinstance(chart, LineChart) else 'point'}{'s' * (count > 1)}"


def _bytes(chart: Chart, form: str) -> bytes:
    return rendered.get((id(chart), form)) or save(chart, form)


def save(chart: Chart, form: str) -> bytes:
    """Render the chart with matplotlib in one of `FORMS`."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC), warnings.catch_warnings():
        # For scripts missing from matplotlib's font, browsers use their own fonts and a PNG shows boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = draw(chart, _PICTURE if form == "png" else _STAND_INS, heading=form == "png")
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        figure.savefig(buffer, format=form, dpi=150 if form == "png" else 72, metadata=metadata)
    return buffer.getvalue()


def _attribute(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return prefix + value
    if name == f"{{{_XLINK}}}href":
        return value.replace("#", f"#{prefix}", 1)
    value = re.sub(r"url\(#", f"url(#{prefix}", value)
    if name == "style":
        value = re.sub(r"#a1b2[0-9a-f]{2}", lambda match: _VARIABLES[match[0]], value)
        value = re.sub(r"font-family: [^;]*; ?", "", value)  # use the page's font
    return value
