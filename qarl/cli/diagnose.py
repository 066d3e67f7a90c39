"""`qarl diagnose`: what one step of a run shows about precision and mismatch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qarl.cli.arguments import argument, option, path_of
from qarl.cli.options import Device, MovedModel
from qarl.inputs.limits import STEPS
from qarl.storage.runs import read_run_config
from qarl.utils.threads import wait_politely

if TYPE_CHECKING:
    from rich.table import Table

    from qarl.diagnose.run import Diagnosed

INDENT = 2  # characters by which metrics are indented below their heading
BESIDE = 80  # minimum characters next to metric names: value, borders, and an explanation of at most two lines


def diagnose(
    run: Annotated[Path, argument("RUN", "A run directory with rollouts and checkpoints.")],
    step: Annotated[
        int | None,
        typer.Option(
            min=0, max=STEPS, help="Step to diagnose. Default: the last one with both rollouts and a checkpoint."
        ),
    ] = None,
    gradients: Annotated[
        bool,
        typer.Option(help="Also run up to six backwards over the step's first minibatch."),
    ] = True,
    out: Annotated[
        Path | None, option("--out", "DIR", "Results directory. Default: RUN/diagnose/NNNNNN.", path_of)
    ] = None,
    model: MovedModel = None,
    device: Device = "auto",
) -> None:
    """Recompute a step's log-probs in the learner's and in the sampler's arithmetic, and interpret the differences.

    Reports which failure mode they indicate: mismatch, phantom clipping, a gradient or an update reversed by low
    precision, error tokens. The run itself is not changed.
    """
    read_run_config(run)  # reject anything but a run before importing torch
    wait_politely()
    from qarl.diagnose.run import diagnose_run
    from qarl.terminal.noise import quiet_libraries

    with quiet_libraries(typer.echo):
        found = diagnose_run(
            run,
            step=step,
            device=device,
            gradients=gradients,
            out=out,
            model=model,
            say=lambda line: typer.echo(f"{line} ...", err=True),
        )
    _print(found)


def _print(found: Diagnosed) -> None:
    from rich.text import Text

    from qarl.diagnose.diagnosis_page import MARKS
    from qarl.terminal.console import table_console

    console = table_console()
    console.print(numbers_table(found.diagnosis.metrics, f"Step {found.diagnosis.step}", console.width))
    for finding in found.findings:
        console.print(
            Text(
                f"{MARKS[finding.level]}: {finding.text}", {"problem": "red", "watch": "yellow"}.get(finding.level, "")
            ),
            soft_wrap=True,
        )
    for line in found.diagnosis.left_out:
        console.print(Text(f"Not measured: {line}."), soft_wrap=True)
    typer.echo(f"page: {found.page}")


def numbers_table(metrics: Mapping[str, float], title: str, width: int) -> Table:
    """Return a table of all metrics, with explanations next to them if `width` characters suffice, else below."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from qarl.diagnose.diagnosis_page import explained, grouped
    from qarl.report.formatting import number

    names = max(map(len, metrics), default=0) + INDENT
    beside = width - names >= BESIDE
    table = Table(title=title, title_justify="left")
    table.add_column("metric", width=names if beside else None)
    table.add_column("value", justify="right", no_wrap=True)
    if beside:
        table.add_column("meaning")
    for heading, rows in grouped(metrics):
        table.add_section()
        table.add_row(Text(heading, "bold"))
        for name, value in rows:
            shown, words = Text(" " * INDENT + name), Text(explained(name), "dim")
            if beside:
                table.add_row(shown, number(value), words)
            else:
                table.add_row(Group(shown, Padding(words, (0, 0, 0, 2 * INDENT))), number(value))
    return table
