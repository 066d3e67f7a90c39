"""`qarl compare`: several runs of one configuration, runs that are there, or one model's schemes without RL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from qarl_formats.scheme import scheme_names

from qarl.cli.arguments import name_of, path_of, text_of
from qarl.config.limits import TOKENS, WORKERS
from qarl.config.quant import GROUPED
from qarl.errors import UserError


def compare(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|STUDY [KEY.PATH=VALUE ...] | RUN RUN ...",
            help="A configuration or a study of named variants (configs/reproductions), whose members are trained "
            "where they are not there yet; or run directories.",
            show_default=False,
        ),
    ] = None,
    schemes: Annotated[
        str | None, typer.Option(metavar="LIST", help=f"Of {','.join(scheme_names())}; default the configuration's.")
    ] = None,
    learners: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Of aligned,fake_quant,full_precision; default the configuration's."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="LIST", help="Such as 0,1,2; default the configuration's.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_of("--out"),
            metavar="DIR",
            help="Directory of table, page, plots and members; default runs/compare-NAME.",
        ),
    ] = None,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(
            parser=path_of("--reuse"),
            metavar="DIR",
            help="Take finished runs of the same configuration from below; repeatable.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            parser=text_of("--profile"),
            metavar="NAME",
            help="Of a STUDY: one of its sizes, such as gpu.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="LIST", help="Of a STUDY: these variants alone.", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=WORKERS, help="Members trained at once; default 1.", show_default=False)
    ] = None,
    offline: Annotated[
        str | None,
        typer.Option(
            parser=name_of("--offline"), metavar="MODEL", help="Compare --schemes of a model or run without RL."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            parser=path_of("--text", stream=True),
            metavar="FILE",
            help="With --offline: UTF-8 text; default one that comes with qarl.",
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(min=-1, max=128, help=f"With --offline: of {GROUPED}; default 128.", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=TOKENS, help="With --offline: tokens of the text used; default 4096.", show_default=False
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(help="With --offline; default auto.", show_default=False)
    ] = None,
) -> None:
    """Compare schemes, learners and seeds of a configuration, a study's variants, or runs that are there.

    Interrupted, the same command goes on. Exit code 1: a member failed; its row says why, the others are there.
    """
    only_offline = {"--text": text, "--group-size": group_size, "--max-tokens": max_tokens, "--device": device}
    only_study = {"--profile": profile, "--only": only}
    only_config = {"--learners": learners, "--seeds": seeds, "--reuse": reuse or None, "--jobs": jobs, **only_study}
    if offline is not None:
        _refuse(only_config, "needs training runs; leave it out with --offline")
        if targets:
            raise UserError(f"compare: '{targets[0]}': --offline takes one model and nothing else; leave it out")
        raise typer.Exit(_offline(offline, schemes, out, {k: v for k, v in only_offline.items() if v is not None}))
    _refuse(only_offline, "is for --offline; leave it out")
    if not targets:
        raise UserError("compare: nothing given; give a CONFIG, two run directories, or --offline MODEL")
    first = path_of("compare")(targets[0])
    if not first.exists():
        raise UserError(f"{targets[0]}: no such file or directory; give a CONFIG, or run directories")
    if first.is_dir():
        from qarl.comparison.command import compare_runs

        _refuse({"--schemes": schemes, **only_config}, "is for a CONFIG; finished runs are compared as they are")
        raise typer.Exit(compare_runs([path_of("compare")(target) for target in targets], out))
    from qarl.comparison.command import compare_config, compare_study
    from qarl.comparison.plan import parse_axes, parse_seeds, split_list
    from qarl.comparison.study import is_study

    if is_study(targets[0]):
        _refuse({"--schemes": schemes, "--learners": learners}, "a study names its variants; leave it out, or edit it")
        chosen = None if only is None else split_list("--only", only, "a,b")
        numbers = None if seeds is None else parse_seeds(seeds)
        raise typer.Exit(compare_study(targets[0], targets[1:], out, reuse or [], profile, chosen, numbers, jobs or 1))
    _refuse(only_study, "is for a study file, see configs/reproductions; leave it out")
    axes = parse_axes(schemes, learners, seeds)
    raise typer.Exit(compare_config(targets[0], targets[1:], axes, out, reuse or [], jobs or 1))


def _offline(model: str, schemes: str | None, out: Path | None, options: dict[str, object]) -> int:
    from qarl.comparison.plan import parse_names

    if schemes is None:
        raise UserError(f"--schemes: needed with --offline, such as --schemes {','.join(scheme_names())}")
    names = parse_names("--schemes", schemes, scheme_names())
    from qarl.threads import wait_politely

    wait_politely()
    from qarl.comparison.offline.command import compare_offline  # torch

    keywords = {name.removeprefix("--").replace("-", "_"): value for name, value in options.items()}
    where = out or Path("runs") / f"offline-{Path(model).name.replace(':', '-')[:100]}"
    return compare_offline(model, names, out=where, **keywords)


def _refuse(options: dict[str, object], why: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{name}: {why}")


def register(app: typer.Typer) -> None:
    app.command()(compare)
