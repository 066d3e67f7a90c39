"""Draw the charts of a page in several processes: matplotlib takes 0.1 s per chart on one core."""

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from qarl.report.blocks import Chart, Section
from qarl.report.charts import FORMS, rendered, save
from qarl.report.drawing import has_data

MOST_PROCESSES = 8
FEWEST_CHARTS = 4  # fewer charts do not justify another process


@contextmanager
def render_in_parallel(sections: Sequence[Section]) -> Iterator[None]:
    """Render the charts of the sections in parallel, one process per core; `svg` and `png` then reuse the results.

    With one core, or other threads (which a fork would lose), charts are rendered on demand as usual.
    """
    charts = [b for section in sections for b in section.blocks if isinstance(b, Chart) and has_data(b)]
    processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(charts) // FEWEST_CHARTS)
    if processes > 1 and threading.active_count() == 1:
        with suppress(OSError):  # no memory or disk for a process; missing charts are rendered on demand
            _draw_all(charts, processes)
    try:
        yield
    finally:
        rendered.clear()


def _draw_all(charts: Sequence[Chart], processes: int) -> None:
    """Fill `rendered`. Each fork renders every `processes`-th chart into files of a private directory."""
    with tempfile.TemporaryDirectory(prefix="qarl-charts-") as directory:
        forks: list[int] = []
        try:
            for share in range(processes):
                forks.append(_fork(charts[share::processes], directory))
        finally:
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forks]
        for share, code in enumerate(codes):
            for chart in charts[share::processes] if code == 0 else ():  # a killed fork leaves partial files
                for form in FORMS:
                    rendered[id(chart), form] = Path(directory, f"{id(chart)}.{form}").read_bytes()


def _fork(charts: Sequence[Chart], directory: str) -> int:
    """Start a process that renders its share and exits; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for chart in charts:
            for form in FORMS:
                Path(directory, f"{id(chart)}.{form}").write_bytes(save(chart, form))
        code = 0
    finally:
        os._exit(code)  # skip the parent's cleanup handlers
