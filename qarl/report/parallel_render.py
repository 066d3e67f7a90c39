"""The charts of a page drawn by several processes: matplotlib takes a tenth of a second for each, on one core."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from qarl.report.blocks import Chart, Section
from qarl.report.charts import FORMS, drawn, save
from qarl.report.figures import has_data

MOST_PROCESSES = 8
FEWEST_CHARTS = 4  # for which another process is worth its start


@contextmanager
def drawn_ahead(sections: Sequence[Section]) -> Iterator[None]:
    """While entered, `svg` and `png` of the sections' charts find what they draw: drawn by as many processes as there
    are cores. With one core, or threads that a fork would not have, they draw as they always do."""
    charts = [b for section in sections for b in section.blocks if isinstance(b, Chart) and has_data(b)]
    processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(charts) // FEWEST_CHARTS)
    if processes > 1 and threading.active_count() == 1:
        with suppress(OSError):  # no room for a process or its files: what is missing is drawn when it is asked for
            _draw_all(charts, processes)
    try:
        yield
    finally:
        drawn.clear()


def _draw_all(charts: Sequence[Chart], processes: int) -> None:
    """Fill `drawn`. Each fork draws every `processes`-th chart into files of a directory of this user alone."""
    with tempfile.TemporaryDirectory(prefix="qarl-charts-") as name:
        directory = Path(name)
        forks: list[int] = []
        try:
            for share in range(processes - 1):
                forks.append(_fork(charts[share::processes], share, processes, directory))
            _draw(charts[processes - 1 :: processes], processes - 1, processes, directory)
        finally:
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forks]
        for share, code in enumerate([*codes, 0]):
            if code == 0:  # a fork that was killed has left none, or half a file
                for place in range(share, len(charts), processes):
                    for form in FORMS:
                        drawn[id(charts[place]), form] = (directory / f"{place}.{form}").read_bytes()


def _fork(charts: Sequence[Chart], share: int, processes: int, directory: Path) -> int:
    """A process that draws and ends. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _draw(charts, share, processes, directory)
        code = 0
    finally:
        os._exit(code)  # past everything that the parent would clean up


def _draw(charts: Sequence[Chart], share: int, processes: int, directory: Path) -> None:
    for index, chart in enumerate(charts):
        for form in FORMS:
            (directory / f"{share + index * processes}.{form}").write_bytes(save(chart, form))
