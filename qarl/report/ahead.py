"""The charts of a page drawn by several processes: matplotlib takes a tenth of a second for each, on one core."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from qarl.report.blocks import Chart, Section
from qarl.report.charts import FORMS, drawn, save
from qarl.report.figures import has_data

MOST_PROCESSES = 8
FEWEST_CHARTS = 4  # for which another process is worth its start

_charts: list[Chart] = []  # what the processes draw; they are forks, and have it


@contextmanager
def drawn_ahead(sections: Sequence[Section]) -> Iterator[None]:
    """While entered, `svg` and `png` of the sections' charts find what they draw: drawn by as many processes as there
    are cores. With one core, or threads that a fork would not have, they draw as they always do."""
    charts = [b for section in sections for b in section.blocks if isinstance(b, Chart) and has_data(b)]
    processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(charts) // FEWEST_CHARTS)
    if processes > 1 and threading.active_count() == 1:
        _charts[:] = charts
        try:
            with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
                both = list(pool.map(_draw, range(len(charts))))
        except (BrokenProcessPool, OSError):  # no process, or one that was killed
            both = []
        drawn.update(
            {(id(c), form): data for c, each in zip(charts, both, strict=False) for form, data in each.items()}
        )
    try:
        yield
    finally:
        drawn.clear()
        _charts.clear()


def _draw(index: int) -> dict[str, bytes]:
    return {form: save(_charts[index], form) for form in FORMS}
