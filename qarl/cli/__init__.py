"""The command line. Parses and prints; the work is done elsewhere. Each further command is a module of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from qarl import __version__
from qarl.cli import compare, diagnose, export, generate, quantize, report, runs
from qarl.cli import eval as evaluation
from qarl.config import Config, check_inputs, load_config
from qarl.errors import UserError
from qarl.threads import wait_politely

if TYPE_CHECKING:
    from qarl.memory import Item

app = typer.Typer(
    help="Train language-model policies on the low-bit tensors they are served with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML configuration; see configs/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Values that replace the file's, as YAML.")
]


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 2 a fault of the user's (one line each on stderr), 130 interrupted."""
    try:
        app(args=argv, prog_name="qarl")
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0)


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Options of `qarl` itself."""


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train a policy."""
    loaded = load_config(config, overrides)
    check_inputs(loaded, config, overrides or [])
    wait_politely()
    from qarl.training.loop import train as run  # torch: only once the configuration is known to be good

    raise typer.Exit(run(loaded))


@app.command()
def check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Validate a configuration, print it with every default, and estimate its memory. Loads no model and no torch."""
    loaded = load_config(config, overrides)
    inspection = check_inputs(loaded, config, overrides or [])
    typer.echo(loaded.to_yaml())
    typer.echo(
        f"{loaded.responses_per_step} responses a step, {loaded.minibatch_size} per optimizer step; run directory "
        f"{loaded.run_dir}"
    )
    if loaded.correction.preset:
        ratio = f"; objective.ratio {loaded.objective.ratio}" if loaded.objective.ratio else ""
        typer.echo(f"correction.preset {loaded.correction.preset}: {loaded.correction}{ratio}")
    if inspection.architecture is None:
        typer.echo(inspection.note)
        return
    from qarl.memory import estimate

    device = loaded.model.device
    if device == "auto":
        # What the driver shows, since only torch could say what it will use.
        device = "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"
    _print_estimate(estimate(loaded, inspection.architecture, device), device)


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration."""
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


def _print_estimate(items: list[Item], device: Literal["cpu", "cuda"]) -> None:
    import psutil
    from rich.console import Console
    from rich.table import Table

    from qarl.memory import peak_bytes

    table = Table(title=f"Memory estimate ({device})", title_justify="left")
    table.add_column("what")
    table.add_column("when")
    table.add_column("GiB", justify="right")
    for item in items:
        table.add_row(item.name, item.phase, f"{item.bytes / 2**30:.2f}")
    table.add_section()
    table.add_row("peak", "always + the larger of update, publish", f"{peak_bytes(items) / 2**30:.2f}")
    if device == "cpu":
        table.add_row("this machine", "", f"{psutil.virtual_memory().total / 2**30:.2f}")
    Console().print(table)


compare.register(app)
generate.register(app)


evaluation.register(app)
export.register(app)
quantize.register(app)

diagnose.register(app)
report.register(app)
runs.register(app)

if __name__ == "__main__":
    main()
