"""Charts rendered in several processes have the same bytes as in one, also if processes fail."""

import os
import threading

import pytest

from qarl.report import charts
from qarl.report import parallel_render as ahead
from qarl.report.blocks import Chart, LineChart, Section, Series, Text
from qarl.report.charts import png, svg
from qarl.report.page import write_page
from qarl.report.parallel_render import render_in_parallel

CHARTS: list[Chart] = [
    LineChart(f"Curve {n}", "step", "mean", [Series("a", [1, 2, 3], [0.1, 0.4, n])]) for n in range(4)
]
EMPTY = LineChart("Empty", "step", "mean", [])
SECTIONS = [Section("One", [Text("text"), *CHARTS[:2]]), Section("Two", [EMPTY, *CHARTS[2:]])]


@pytest.fixture
def forks(monkeypatch):
    """Simulate a program with one thread on a machine with two cores, each with few charts to render."""
    monkeypatch.setattr(ahead, "FEWEST_CHARTS", 2)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def test_processes_render_every_chart_as_this_process_does(forks, monkeypatch, tmp_path):
    expected = [(svg(chart, "x-"), png(chart)) for chart in CHARTS]
    with render_in_parallel(SECTIONS):
        assert len(charts.rendered) == 2 * len(CHARTS)
        with monkeypatch.context() as patch:
            patch.setattr(charts, "save", lambda chart, form: pytest.fail("drawn again"))
            assert [(svg(chart, "x-"), png(chart)) for chart in CHARTS] == expected
        assert "no data" in svg(EMPTY)
    assert not charts.rendered
    files = write_page(tmp_path / "page.html", "Page", "", SECTIONS)
    assert [file.read_bytes() for file in files] == [data for _, data in expected]


def test_a_program_with_threads_does_not_fork(monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    with render_in_parallel(SECTIONS):
        assert not charts.rendered
