"""`qarl compare`: several runs of one configuration, existing runs, or schemes of a model without RL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from qarl_formats.registry import scheme_names

from qarl import api
from qarl.cli.arguments import name_of, option, path_of, stream_of
from qarl.cli.options import Calibration, CalibrationSamples
from qarl.comparison.api import OFFLINE_TOKENS, refuse
from qarl.config.quant import GROUPED, KVCacheDtype
from qarl.errors import UserError
from qarl.inputs.limits import TOKENS, WORKERS


def compare(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|STUDY [KEY.PATH=VALUE ...] | RUN RUN ...",
            help="A configuration, or a study of named variants (configs/reproductions): trains the missing members. "
            "Or existing run directories.",
        ),
    ] = None,
    schemes: Annotated[
        str | None,
        option("--schemes", "LIST", f"Choose from {','.join(scheme_names())}. Default: as configured."),
    ] = None,
    learners: Annotated[
        str | None,
        option("--learners", "LIST", "Choose from aligned,fake_quant,full_precision. Default: as configured."),
    ] = None,
    seeds: Annotated[str | None, option("--seeds", "LIST", "Such as 0,1,2. Default: as configured.")] = None,
    out: Annotated[
        Path | None,
        option("--out", "DIR", "Directory for table, page, plots and members. Default: runs/compare-NAME.", path_of),
    ] = None,
    reuse: Annotated[
        list[Path] | None,
        option("--reuse", "DIR", "Reuse finished runs of the same configuration found in DIR. Repeatable.", path_of),
    ] = None,
    profile: Annotated[str | None, option("--profile", "NAME", "One of a STUDY's profiles, such as gpu.")] = None,
    only: Annotated[str | None, option("--only", "LIST", "Train only these variants of a STUDY.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, max=WORKERS, help="Number of members trained concurrently, spread over the GPUs. Default: 1."
        ),
    ] = None,
    offline: Annotated[
        str | None, option("--offline", "MODEL", "Compare the --schemes of a model or run without RL.", name_of)
    ] = None,
    text: Annotated[
        Path | None,
        option("--text", "FILE", "With --offline: UTF-8 text file. Default: a text included in qarl.", stream_of),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(min=-1, max=128, help=f"With --offline: group size of {GROUPED}. Default: 128.")
    ] = None,
    kv_cache_dtype: Annotated[
        KVCacheDtype | None,
        typer.Option(help="With --offline: KV cache dtype of every scheme. Default: the run's."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=TOKENS, help="With --offline: number of tokens of the text to use. Default: 4096."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(help="With --offline: device. Default: auto.")
    ] = None,
    verify_digests: Annotated[
        bool | None,
        typer.Option(help="With --offline: check an exported model against its qarl_export.json. Default: on."),
    ] = None,
    methods: Annotated[
        str | None,
        option("--methods", "LIST", "With --offline: rtn,gptq,awq; one row per scheme and method. Default: rtn."),
    ] = None,
    calibration: Calibration = None,
    calibration_samples: CalibrationSamples = None,
) -> None:
    """Compare schemes, learners and seeds of a configuration, variants of a study, or existing runs.

    Rerun the same command to resume an interrupted comparison. Exit code 1: a member failed; its row says why.
    """
    only_offline: dict[str, object] = {"--text": text, "--group-size": group_size, "--max-tokens": max_tokens}
    only_offline |= {"--kv-cache-dtype": kv_cache_dtype, "--device": device}
    only_offline |= {"--verify-digests": verify_digests, "--methods": methods, "--calibration": calibration}
    only_offline |= {"--calibration-samples": calibration_samples}
    only_config = {"--learners": learners, "--seeds": seeds, "--reuse": reuse or None, "--jobs": jobs}
    only_study = {"--profile": profile, "--only": only}
    if offline is not None:
        refuse(only_config | only_study, "needs training runs; remove it or --offline")
        if offline.startswith("-"):
            raise UserError(
                f"--offline: '{offline}' is not a model; give a run, a directory, a hub name, or package:NAME"
            )
        if schemes is None:
            raise UserError(f"--schemes: needed with --offline, such as --schemes {','.join(scheme_names())}")
        done = api.compare_offline(
            offline,
            schemes,
            text=text,
            group_size=group_size,
            kv_cache_dtype=kv_cache_dtype,
            max_tokens=max_tokens or OFFLINE_TOKENS,
            out=out,
            device=device or "auto",
            verify_digests=verify_digests is not False,
            methods=methods or "rtn",
            calibration=calibration,
            calibration_samples=calibration_samples,
            trained=targets or (),
        )
        raise typer.Exit(done.exit_code)
    refuse(only_offline, "requires --offline")
    if not targets:
        raise UserError("compare: nothing to compare; give a CONFIG, two run directories, or --offline MODEL")
    first = path_of("compare")(targets[0])
    if not first.exists():
        raise UserError(f"{targets[0]}: no such file or directory; give a CONFIG, or run directories")
    runs = first.is_dir()
    done = api.compare(
        [path_of("compare")(target) for target in targets] if runs else targets[0],
        () if runs else targets[1:],
        schemes=schemes,
        learners=learners,
        seeds=seeds,
        out=out,
        reuse=reuse or (),
        profile=profile,
        only=only,
        jobs=jobs,
    )
    raise typer.Exit(done.exit_code)
