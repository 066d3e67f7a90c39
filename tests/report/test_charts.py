"""Charts: contents of the SVG and PNG, gaps, thinning and notes."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hand_made_runs import HOSTILE

from qarl.report.blocks import Bar, BarChart, Histogram, LineChart, Points, Scatter, Series
from qarl.report.charts import chart_note, png, svg
from qarl.report.drawing import MAX_DOTS, MAX_POINTS, TickText, thin

SVG = "{http://www.w3.org/2000/svg}"
CHARTS = [
    LineChart("Reward", "step", "mean", [Series("a", [1, 2, 3], [0.1, 0.4, 0.2], [0, 0, 0], [1, 1, 1])]),
    LineChart("Delta", "step", "nats", [Series("a", range(50), [10.0**-i for i in range(50)])], log_y=True),
    BarChart("Accuracy", "fraction", [Bar("w4a16", 0.4, 0.3, 0.5), Bar("bf16", None)]),
    Histogram("Lengths", "tokens", "responses", [1.0, 2.0, 2.0, 7.0]),
    Scatter(
        *("Gap", "p", "nats", [Points("a", [0.1, 0.9], [0.2, 0.1]), Points("b", [0.5], [0.4])]),
        **{"diagonal": True, "band": (0.1, None), "line": Series("mean", [0.1, 0.9], [0.2, 0.1])},
    ),
]


def curve(chart: LineChart) -> str:
    """Path data of the first curve."""
    return next(
        path.get("d", "")
        for path in ET.fromstring(svg(chart)).iter(f"{SVG}path")
        if "stroke: var(--curve-0)" in path.get("style", "") and "fill: none" in path.get("style", "")
    )


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_a_chart_repeats_byte_for_byte_with_colours_as_variables_and_its_containers_size(chart):
    text = svg(chart)
    assert svg(chart) == text and png(chart) == png(chart)
    root = ET.fromstring(text)
    assert not re.findall(r"#[0-9a-f]{6}\b", text)
    assert root.get("width") is None and root.get("viewBox") and root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == chart.title
    assert "<metadata" not in text and "<style" not in text


def test_ids_carry_the_prefix_and_hostile_names_are_text():
    text = svg(CHARTS[0], "c7-")
    ids = set(re.findall(r' id="([^"]*)"', text))
    references = set(re.findall(r'href="#([^"]*)"', text)) | set(re.findall(r"url\(#([^)]*)\)", text))
    assert references and all(name.startswith("c7-") for name in ids)
    assert references <= ids
    chart = BarChart(HOSTILE, HOSTILE, [Bar(HOSTILE[:20], 1.0), Bar("$\\frac{", 2.0), Bar("_hidden", 3.0)])
    root = ET.fromstring(svg(chart))
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {HOSTILE[:20], "$\\frac{", "_hidden"} <= texts
    assert not [element for element in root.iter() if element.tag in (f"{SVG}script", f"{SVG}image")]


@pytest.mark.parametrize("missing", [None, math.inf])
def test_a_missing_point_is_a_gap(missing):
    whole = LineChart("t", "step", "y", [Series("a", [1, 2, 3, 4, 5], [1.0, 2.0, 3.0, 2.0, 1.0])])
    broken = LineChart("t", "step", "y", [Series("a", [1, 2, 3, 4, 5], [1.0, 2.0, missing, 2.0, 1.0])])
    assert curve(whole).count("M") == 1
    assert curve(broken).count("M") == 2


@pytest.mark.parametrize(
    "chart",
    [
        LineChart("t", "x", "y", [Series("a", [1], [None])]),
        BarChart("t", "y", [Bar("a", None)]),
        Histogram("t", "x", "y", []),
        Scatter("t", "x", "y", [Points("a", [1.0], [None])]),
    ],
)
def test_a_chart_without_data_says_so(chart):
    assert ">no data<" in svg(chart)
    assert png(chart).startswith(b"\x89PNG")


@pytest.mark.parametrize("value", [0.0, 1e9])
def test_a_flat_curve_and_a_single_point_are_drawn(value):
    for count in (1, 40):
        assert "no data" not in svg(LineChart("t", "x", "y", [Series("a", range(count), [value] * count)]))


def test_axes_start_at_0_and_a_log_axis_notes_what_it_omits():
    drawn = svg(BarChart("t", "y", [Bar("a", 0.0), Bar("b", 0.0)]))
    assert ">1.0<" in drawn and "0.05<" not in drawn
    some = LineChart("t", "x", "y", [Series("a", [1, 2, 3], [0.0, 1.0, 10.0])], log_y=True)
    none = LineChart("t", "x", "y", [Series("a", [1, 2], [0.0, 0.0])], log_y=True)
    assert chart_note(some) == "1 value at 0 or below, which a log axis cannot show."
    assert "the axis is linear" in chart_note(none)
    y = [1.0, *[0.0, -1.0] * 600]
    cloud = chart_note(Scatter("t", "x", "y", [Points("a", range(len(y)), y)], log_y=True))
    assert cloud == "1,200 points at 0 or below, which a log axis cannot show."


def test_a_long_curve_and_many_points_are_thinned_with_a_note():
    values = [float(i % 2) for i in range(4 * MAX_POINTS)]
    series, each = thin(Series("a", range(len(values)), values))
    assert each == 4 and len(series.x) == MAX_POINTS and set(series.y) == {0.5}
    assert thin(Series("a", range(MAX_POINTS + 1), values[: MAX_POINTS + 1]))[1] == 2
    assert set(series.low) == {0.0} and set(series.high) == {1.0}
    assert "the mean of 4" in chart_note(LineChart("t", "x", "y", [Series("a", range(len(values)), values)]))
    count = 3 * MAX_DOTS
    chart = Scatter("t", "x", "y", [Points("a", range(count), [float(i % 7) for i in range(count)])])
    assert dots(chart) == MAX_DOTS
    assert chart_note(chart) == "One point in 3 of the largest class is drawn."


@pytest.mark.parametrize(
    "ticks, shown",
    [
        ([0.0, 0.25, 0.5], ["0", "0.25", "0.50"]),
        ([1.0, 1.00001], ["1.00000", "1.00001"]),
        ([0.0, 2e-5, 4e-5], ["0", "2e-05", "4e-05"]),
        ([0.0, 1.5e6], ["0", "1.5M"]),
    ],
)
def test_ticks_have_the_digits_that_distinguish_them(ticks, shown):
    formatter = TickText()
    formatter.set_locs(ticks)
    assert [formatter(tick) for tick in ticks] == shown


def dots(chart: Scatter) -> int:
    """Strokes of the first class of points: each is a move and a line."""
    paths = ET.fromstring(svg(chart)).iter(f"{SVG}path")
    return sum(
        path.get("d", "").count("M")
        for path in paths
        if "stroke: var(--curve-0)" in path.get("style", "") and "stroke-linecap: round" in path.get("style", "")
    )
