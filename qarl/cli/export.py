"""`qarl export`: a run's checkpoint as a compressed-tensors checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from qarl.cli.arguments import MovedModel, name_of, path_of, text_of
from qarl.config.limits import STEPS
from qarl.errors import UserError
from qarl.export.staging import require_vacant
from qarl.inference.target import Target, resolve_target
from qarl.storage.shards import parse_size
from qarl.threads import wait_politely

if TYPE_CHECKING:
    from qarl.export.writer import ExportReport

ShardSize = Annotated[
    str,
    typer.Option(
        "--max-shard-size",
        parser=text_of("--max-shard-size"),
        metavar="SIZE",
        help="Tensors in one file at most, e.g. 5GB or 500MB.",
    ),
]
Unpacked = Annotated[
    bool, typer.Option("--unpacked", help="int4 codes one to a byte (int-quantized), which some W4A8 kernels want.")
]


def export(
    run: Annotated[
        str,
        typer.Argument(parser=name_of("RUN"), metavar="RUN", help="Run directory, or one of its checkpoints."),
    ],
    out: Annotated[
        Path | None,
        typer.Argument(parser=path_of("OUT"), metavar="[OUT]", help="New directory; default RUN/export."),
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, max=STEPS, help="Which checkpoint; default the newest.")] = None,
    model: MovedModel = None,
    dtype: Annotated[Literal["bf16"] | None, typer.Option(help="Export the masters, unquantized.")] = None,
    max_shard_size: ShardSize = "5GB",
    unpacked: Unpacked = False,
    verify: Annotated[bool, typer.Option("--verify", help="Load it again and compare it with the run.")] = False,
) -> None:
    """Write a run's checkpoint as a compressed-tensors checkpoint for vLLM and transformers; its codes bit for bit.

    With --verify the exit code is 1 if a reader disagrees with the run; the checkpoint stays, with verification.json.
    """
    target = resolve_target(run, step=step, model=model, quant=None if dtype is None else {"scheme": "bf16"})
    if target.run_dir is None:
        kinds = {"export": "is exported already", "model": "is a model, no run"}
        what = kinds[target.kind] if Path(run).expanduser().exists() else "is no run directory"
        raise UserError(f"RUN: {run} {what}; give a run directory, or use qarl quantize for a model")
    out = out or target.run_dir / "export"
    report = write(target, out, max_shard_size, unpacked, unquantized=dtype is not None)
    show(report)
    if verify:
        from qarl.export.verify import verify_export
        from qarl.training.noise import quiet_libraries

        with quiet_libraries(typer.echo):
            record = verify_export(target, out, device="auto", say=typer.echo)
        if not record["ok"]:
            raise typer.Exit(1)


def write(target: Target, out: Path, max_shard_size: str, unpacked: bool, unquantized: bool = False) -> ExportReport:
    """Export with a progress bar. unquantized: in bfloat16, whatever the model's compute dtype is."""
    max_shard_bytes = parse_size(max_shard_size)
    require_vacant(out)
    wait_politely()
    import torch  # only once the arguments are known to be good

    from qarl.export.job import export_target
    from qarl.policy.device import DTYPES
    from qarl.training.noise import quiet_libraries

    dtype = torch.bfloat16 if unquantized else DTYPES[target.model.dtype]
    with quiet_libraries(typer.echo), _bar(str(out)) as progress:
        return export_target(
            target, out, dtype=dtype, max_shard_bytes=max_shard_bytes, unpacked=unpacked, progress=progress
        )


def show(report: ExportReport) -> None:
    """Say what was written."""
    weights = [name for name in report.files if name.endswith(".safetensors")]
    total = sum(report.files.values())
    typer.echo(f"{report.path}: {total:,} bytes in {len(report.files)} files, {len(weights)} of them with tensors")
    ratio = report.tensor_bytes / report.bf16_bytes
    typer.echo(f"tensors: {report.tensor_bytes:,} bytes, {ratio:.3f} of the {report.bf16_bytes:,} in bf16")
    proof = "the digest that the run recorded" if report.same_as_run else "read back from the files"
    typer.echo(f"snapshot sha256 {report.digest[:16]}: {proof}")


@contextmanager
def _bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Bytes written, at a terminal; nothing else where."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from qarl.terminal.console import Console

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def register(app: typer.Typer) -> None:
    app.command()(export)
