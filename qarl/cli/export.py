"""`qarl export`: write a run's checkpoint as a compressed-tensors checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from qarl import api
from qarl.cli.arguments import argument, name_of, option
from qarl.cli.options import MovedModel, Step
from qarl.types import ExportResult

ShardSize = Annotated[str, option("--max-shard-size", "SIZE", "Maximum size of one file, such as 5GB or 500MB.")]
Unpacked = Annotated[
    bool, typer.Option("--unpacked", help="Store one int4 code per byte (int-quantized), as some W4A8 kernels require.")
]
NoVllm = Annotated[
    bool,
    typer.Option("--no-vllm", help="Allow formats that only transformers and qarl can load, not vLLM."),
]
PushToHub = Annotated[
    str | None,
    option("--push-to-hub", "NAME", "Upload the export and its card to this model repository of the Hugging Face hub."),
]


def export(
    run: Annotated[str, argument("RUN", "Run directory, or one of its checkpoints.", name_of)],
    out: Annotated[Path | None, argument("[OUT]", "New directory. Default: RUN/export.")] = None,
    step: Step = None,
    model: MovedModel = None,
    dtype: Annotated[
        Literal["bf16"] | None, typer.Option(help="Export the master weights in this dtype, unquantized.")
    ] = None,
    max_shard_size: ShardSize = "5GB",
    unpacked: Unpacked = False,
    no_vllm: NoVllm = False,
    verify: Annotated[bool, typer.Option("--verify", help="Load the result and compare it with the run.")] = False,
    push_to_hub: PushToHub = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new --push-to-hub repository private.")] = False,
) -> None:
    """Write a run's checkpoint as a compressed-tensors checkpoint for vLLM and transformers, bit for bit.

    With --verify, exit code 1 means that a reader disagrees with the run. The export is kept, with verification.json,
    but not pushed.
    """
    with bar(str(out or "export")) as progress:
        written = api.export(
            run,
            out,
            step=step,
            model=model,
            dtype=dtype,
            max_shard_size=max_shard_size,
            unpacked=unpacked,
            for_vllm=not no_vllm,
            verify=verify,
            push_to_hub=push_to_hub,
            private=private,
            progress=progress,
            say=typer.echo,
        )
    show(written)
    if written.pushed is not None:
        typer.echo(f"pushed to {written.pushed}")
    if verify and not written.verified:
        raise typer.Exit(1)


def show(report: ExportResult) -> None:
    """Print a summary of the export."""
    weights = [name for name in report.files if name.endswith(".safetensors")]
    total = sum(report.files.values())
    typer.echo(f"{report.path}: {total:,} bytes in {len(report.files)} files, {len(weights)} of them with tensors")
    ratio = report.tensor_bytes / report.bf16_bytes
    typer.echo(f"tensors: {report.tensor_bytes:,} bytes, {ratio:.3f} of the {report.bf16_bytes:,} in bf16")
    proof = "the digest that the run recorded" if report.same_as_run else "read back from the files"
    typer.echo(f"snapshot sha256 {report.digest[:16]}: {proof}")
    if report.fault is not None:
        typer.echo(f"transformers 5 cannot load it: {report.fault}")


@contextmanager
def bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show the number of bytes written, only on a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from qarl.terminal.console import Console

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
