"""Charts drawn by several processes: the same bytes, and as before where there can be no process."""

from __future__ import annotations

import os
import threading
from concurrent.futures.process import BrokenProcessPool

import pytest

from qarl.report import ahead, charts
from qarl.report.ahead import drawn_ahead
from qarl.report.blocks import Chart, LineChart, Section, Series, Text
from qarl.report.charts import chart_files, png, svg

CHARTS: list[Chart] = [
    LineChart(f"Curve {n}", "step", "mean", [Series("a", [1, 2, 3], [0.1, 0.4, n])]) for n in range(9)
]
EMPTY = LineChart("Empty", "step", "mean", [])
SECTIONS = [Section("One", [Text("text"), *CHARTS[:5]]), Section("Two", [EMPTY, *CHARTS[5:]])]


@pytest.fixture
def forks(monkeypatch):
    """As in a program of one thread, on a machine of two cores."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def test_the_processes_draw_every_chart_as_it_is_drawn_here(forks, monkeypatch, tmp_path):
    expected = [(svg(chart, "x-"), png(chart)) for chart in CHARTS]
    with drawn_ahead(SECTIONS):
        assert len(charts.drawn) == 2 * len(CHARTS)
        with monkeypatch.context() as patch:
            patch.setattr(charts, "save", lambda chart, form: pytest.fail("drawn again"))
            assert [(svg(chart, "x-"), png(chart)) for chart in CHARTS] == expected
            assert list(chart_files(tmp_path, SECTIONS).values()) == [data for _, data in expected]
        assert "no data" in svg(EMPTY)
    assert not charts.drawn and not ahead._charts


@pytest.mark.parametrize("error", [BrokenProcessPool("killed"), OSError(11, "no more processes")])
def test_without_processes_the_charts_are_drawn_here(forks, monkeypatch, error):
    def refused(*arguments):
        raise error

    expected = png(CHARTS[0])
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", refused)
    with drawn_ahead(SECTIONS):
        assert not charts.drawn and png(CHARTS[0]) == expected


def test_a_program_with_threads_does_not_fork(monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", lambda *arguments: pytest.fail("forked"))
    with drawn_ahead(SECTIONS):
        assert not charts.drawn
