"""`qarl report`: write the page of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qarl.cli.arguments import argument, option, path_of


def report(
    run: Annotated[Path, argument("RUN", "A run directory, finished or not.")],
    out: Annotated[
        Path | None,
        option("--out", "FILE", "File of the page; plots/ is written next to it. Default: RUN/report.html.", path_of),
    ] = None,
) -> None:
    """Write a run's page: curves, mismatch, samples, evaluation, configuration. One HTML file, and plots as PNG."""
    from qarl.report.run_report import write_report

    typer.echo(write_report(run, out))
