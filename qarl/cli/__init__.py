"""The command line: parsing and printing only. Other commands have one module each."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Literal, NoReturn

import typer

from qarl import __version__, api
from qarl.checks.check import check_run
from qarl.cli import compare, diagnose, export, generate, quantize, report, runs, verify_exact
from qarl.cli import eval as evaluation
from qarl.cli.arguments import UsageError, usage_line
from qarl.cli.launch import gpus_for_ranks, train_on_ranks
from qarl.config import Config, load_config
from qarl.config.messages import fault_line
from qarl.distributed.exit_records import mark_done, write_exit_record
from qarl.distributed.fault import OTHER_RANK, OtherRankFailed
from qarl.distributed.rank_info import own_arguments, rank_info, rank_of_several
from qarl.errors import UNEXPECTED, UserError, machine_fault, memory_errors, unexpected, with_traceback
from qarl.inputs.code import describe
from qarl.inputs.limits import DEVICES
from qarl.memory.estimate import Item, estimate, peak_bytes
from qarl.memory.host import expected_device, too_large
from qarl.memory.sizes import decide_sizes, decided
from qarl.objectives.base import RatioObjective
from qarl.terminal.streams import inert_output
from qarl.training.balance import assumed_length, split_text, step_time
from qarl.utils.machine import gpu_bytes, machine_bytes

app = typer.Typer(
    help="Train language-model policies on the low-bit tensors they are served with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # usage errors are printed like all others, see qarl.terminal
)

NOT_HERE = "warning: will not train here: "  # the configuration may train on another machine

ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML configuration; see configs/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Overrides of the file's values, as YAML.")
]
Processes = Annotated[
    int | None,
    typer.Option("--nproc", min=1, max=DEVICES, help="Number of ranks on this machine, one per GPU. Default: 1."),
]


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Exit codes: 0 complete; 2 an error that the user can fix, one line per error on stderr; 70 an internal error, one
    line and a file with the traceback; 75 another rank of the run failed; 129, 130 or 143 stopped by a signal.

    Args:
        argv: Arguments without the program's name. Default: those of the process.
    """
    try:
        _main(argv)
    except SystemExit as end:
        if end.code and rank_of_several():
            # Normal interpreter shutdown may wait for collectives that other ranks never enter.
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


@inert_output()
def _main(argv: list[str] | None) -> NoReturn:
    try:
        with memory_errors("use a larger machine"):  # used where the failing code does not suggest what to lower
            # Not standalone: usage errors are printed as one line too.
            code = app(args=own_arguments(argv), prog_name="qarl", standalone_mode=False)
    except UserError as error:
        _say(str(error), 2)
        raise SystemExit(2) from None
    except OtherRankFailed as error:
        _say(f"{error}; this rank stops too; rerun the same command to resume", OTHER_RANK)
        raise SystemExit(OTHER_RANK) from None
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # only in some versions of typer
            error.show()
        else:
            print(f"error: {usage_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None
    except Exception as error:  # last resort
        if (line := machine_fault(error)) is not None:
            _say(with_traceback(line, error), 2)
            raise SystemExit(2) from None
        _say(unexpected(error), UNEXPECTED)
        raise SystemExit(UNEXPECTED) from None
    except BaseException as error:  # commands return their exit code, so SystemExit comes from code that they called
        _say(f"code called by the command tried to exit with {describe(error)}", 2)
        raise SystemExit(2) from None
    if not code:
        mark_done()
    raise SystemExit(code or 0)


def _say(text: str, code: int) -> None:
    """Print an error on stderr, unless the launcher prints it from this rank's exit record."""
    if write_exit_record(text, code):
        return
    for line in text.split("\n"):
        print(f"error: {line}", file=sys.stderr)


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `qarl` itself."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory was removed; change to an existing one") from None


@app.command()
def train(config: ConfigFile, overrides: Overrides = None, nproc: Processes = None) -> None:
    """Train a policy by reinforcement learning, or as `objective.name` says."""
    raise typer.Exit(_train(config, overrides or [], nproc))


@app.command()
def sft(config: ConfigFile, overrides: Overrides = None, nproc: Processes = None) -> None:
    """Train a policy on given responses (supervised fine-tuning). Sets objective.name: sft."""
    raise typer.Exit(_train(config, ["objective.name=sft", *(overrides or [])], nproc))


@app.command()
def distill(config: ConfigFile, overrides: Overrides = None, nproc: Processes = None) -> None:
    """Train a policy towards the distribution of a teacher. Sets objective.name: distill."""
    raise typer.Exit(_train(config, ["objective.name=distill", *(overrides or [])], nproc))


def _train(config: str, overrides: list[str], nproc: int | None) -> int:
    """Train in this process, or start `nproc` ranks. Returns the exit code."""
    own = rank_info()
    if own is None and nproc is not None and nproc > 1:
        return train_on_ranks(config, overrides, nproc)
    if own is not None and nproc not in (None, own.count):
        raise UserError(f"--nproc: {nproc}, but a launcher has started {own.count} ranks already; remove the option")
    return api.train(config, overrides).exit_code


@app.command()
def check(config: ConfigFile, overrides: Overrides = None, nproc: Processes = None) -> None:
    """Validate a configuration, print it with every default, and estimate its memory. Loads no model and no torch."""
    loaded = load_config(config, overrides)
    ranks = nproc or 1
    inspection = check_run(loaded, ranks, gpus_for_ranks(loaded), config, overrides or [])
    typer.echo(loaded.to_yaml())
    typer.echo(
        f"{loaded.responses_per_step} responses per step, {loaded.minibatch_size} per optimizer step; run directory "
        f"{loaded.run_dir}"
    )
    device = expected_device(loaded)
    memory = gpu_bytes() if device == "cuda" else None
    sized = decide_sizes(loaded, device, inspection.architecture, memory, ranks)
    for line in decided(loaded, sized, device):
        typer.echo(line)
    for needed in loaded.faults_without_gpu() if device == "cpu" else ():
        typer.echo(f"{NOT_HERE}{fault_line(*needed)}")
    if loaded.correction.preset:
        ratio = f"; objective.ratio {loaded.objective.ratio}" if isinstance(loaded.objective, RatioObjective) else ""
        typer.echo(f"correction.preset {loaded.correction.preset}: {loaded.correction}{ratio}")
    if inspection.architecture is None:
        typer.echo(inspection.note)
        return
    _print_estimate(estimate(sized, inspection.architecture, device, ranks=ranks, memory=memory), device, ranks)
    if device == "cuda" and loaded.rollout.samples_ahead:
        length = assumed_length(sized)
        typer.echo(split_text(step_time(sized, inspection.architecture, length), length))
    if fault := too_large(loaded, inspection.architecture, device, ranks):
        typer.echo(f"{NOT_HERE}{fault}")


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration."""
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


def _print_estimate(items: list[Item], device: Literal["cpu", "cuda"], ranks: int) -> None:
    from qarl.report.blocks import Column, Table
    from qarl.terminal.console import print_table, table_console

    peak = peak_bytes(items)
    sizes = [
        *((item.name, item.phase, item.bytes) for item in items),
        ("peak", "always + the largest other item", peak),
    ]
    if device == "cpu":
        sizes += [("all ranks", "", ranks * peak)] if ranks > 1 else []
        sizes.append(("this machine, including swap", "", machine_bytes()))
    rows = [[what, when, f"{size / 2**30:.2f}"] for what, when, size in sizes]
    each = f" of each of {ranks} ranks" if ranks > 1 else ""
    columns = [Column("what"), Column("when"), Column("GiB", "right")]
    print_table(Table(columns, rows, f"Memory estimate{each} ({device})"), table_console(), wrapped=True)


app.command()(compare.compare)
app.command()(generate.generate)
app.command("eval")(evaluation.evaluate)
app.command()(export.export)
app.command()(quantize.quantize)
app.command()(diagnose.diagnose)
app.command("verify-exact")(verify_exact.verify_exact)
app.command()(report.report)
app.command()(runs.runs)
