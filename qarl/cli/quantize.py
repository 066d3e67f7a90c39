"""`qarl quantize`: write a model as a compressed-tensors checkpoint, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from qarl_formats.registry import scheme_names

from qarl import api
from qarl.cli.arguments import argument, name_of, option
from qarl.cli.export import NoVllm, ShardSize, Unpacked, bar, show
from qarl.cli.options import Calibration, CalibrationSamples, GroupSize, VerifyDigests
from qarl.config.quant import GROUPED, ZERO_POINTS

SCHEMES = ", ".join(scheme_names(lambda kind: kind.weight_bits is not None))


def quantize(
    model: Annotated[str, argument("MODEL", "Directory, hub name, or package:NAME.", name_of)],
    out: Annotated[Path, argument("OUT", "New directory.")],
    scheme: Annotated[str, option("--scheme", "SCHEME", f"{SCHEMES}, or bf16 for no quantization.")],
    group_size: GroupSize = None,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help=f"Use zero points ({ZERO_POINTS}).")] = False,
    grid: Annotated[
        str | None, option("--grid", "GRID", f"symmetric7: codes -7 to 7 instead of -8 to 7 ({GROUPED}).")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        option("--ignore", "NAME", "Layer to leave unquantized in addition to lm_head, or re:REGEX. Repeatable."),
    ] = None,
    method: Annotated[
        Literal["rtn", "gptq", "awq"],
        typer.Option(help="rtn: nearest codes, a baseline; gptq, awq: codes chosen from calibration text."),
    ] = "rtn",
    calibration: Calibration = None,
    calibration_samples: CalibrationSamples = None,
    max_shard_size: ShardSize = "5GB",
    unpacked: Unpacked = False,
    verify_digests: VerifyDigests = True,
    no_vllm: NoVllm = False,
) -> None:
    """Write a model as a compressed-tensors checkpoint, without training: rounded to nearest, by GPTQ or by AWQ."""
    with bar(str(out)) as progress:
        written = api.quantize(
            model,
            out,
            scheme,
            group_size=group_size,
            symmetric=not asymmetric,
            grid=grid,
            ignore=ignore or (),
            method=method,
            calibration=calibration,
            calibration_samples=calibration_samples,
            max_shard_size=max_shard_size,
            unpacked=unpacked,
            verify_digests=verify_digests,
            for_vllm=not no_vllm,
            progress=progress,
        )
    show(written)
