"""`qarl diagnose`: what one step of a run shows of precision and mismatch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from qarl.threads import wait_politely

if TYPE_CHECKING:
    from qarl.diagnosis.command import Diagnosed


def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory with rollouts and checkpoints.")],
    step: Annotated[
        int | None, typer.Option(help="Which step; default the last one with both rollouts and a checkpoint.")
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients/--no-gradients", help="Four backwards over the step's first minibatch.")
    ] = True,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Default RUN/diagnose/NNNNNN.")] = None,
    model: Annotated[str | None, typer.Option(help="Where the run's base model is now, if it moved.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA where there is one.")] = "auto",
) -> None:
    """Recompute a step's log-probs in the learner's and in the sampler's arithmetic, and read the numbers.

    Says which failure mode they point to: mismatch, phantom clipping, a gradient or an update that precision turns,
    error tokens. The run itself stays as it is.
    """
    wait_politely()
    from qarl.diagnosis.command import diagnose_run
    from qarl.training.noise import quiet_libraries

    with quiet_libraries(typer.echo):
        found = diagnose_run(run, step=step, device=device, gradients=gradients, out=out, model=model,
                             say=lambda line: typer.echo(f"{line} ...", err=True))  # fmt: skip
    _print(found)


def _print(found: Diagnosed) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from qarl.diagnosis.page import MARKS, grouped
    from qarl.report.formatting import number

    console = Console()
    table = Table(title=f"Step {found.diagnosis.step}", title_justify="left")
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right")
    for title, rows in grouped(found.diagnosis.metrics):
        table.add_section()
        table.add_row(Text(title, "bold"), "")
        for name, value in rows:
            table.add_row(Text(f"  {name}"), number(value))
    console.print(table)
    for finding in found.findings:
        console.print(Text(f"{MARKS[finding.level]}: {finding.text}", {"problem": "red", "watch": "yellow"}.get(
            finding.level, "")), soft_wrap=True)  # fmt: skip
    for line in found.diagnosis.left_out:
        console.print(Text(f"Not measured: {line}."), soft_wrap=True)
    typer.echo(f"page: {found.page}")


def register(app: typer.Typer) -> None:
    app.command()(diagnose)
