"""`qarl eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qarl.config.evaluation_presets import PRESETS
from qarl.errors import UserError
from qarl.threads import wait_politely


def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT|MODEL", help="What to evaluate.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=PATH]",
            help=f"A set ({', '.join(PRESETS)}), from the hub or from a local file with its columns; may be given "
            "again. Without it: the run's evaluation.tasks, or else its training data.",
        ),
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="Quantize to this scheme; default: the run's own, bf16 for a model.")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Of the scheme's weights; -1: one group a row.")] = None,
    samples: Annotated[int | None, typer.Option(help="Responses per prompt; default 4, greedy 1.")] = None,
    k: Annotated[str | None, typer.Option(help="Every k of pass@k, as in 1,4; default 1 and --samples.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    max_response_length: Annotated[
        int | None, typer.Option(help="Tokens; default: as the run evaluates, 1024 with --data.")
    ] = None,
    max_prompts: Annotated[int | None, typer.Option(help="Only the first prompts of each set.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random streams; default 0.")] = None,
    step: Annotated[int | None, typer.Option(help="Which checkpoint of a run; default the newest.")] = None,
    model: Annotated[str | None, typer.Option(help="Where the run's base model is now, if it moved.")] = None,
    out: Annotated[Path | None, typer.Option(help="Results directory; default RUN/eval/... or eval/...")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA where there is one.")] = "auto",
) -> None:
    """Evaluate a quantized policy: avg@k and pass@k with 95 % confidence intervals. Rerun to go on."""
    ks = None if k is None else _numbers(k)
    quant = {name: value for name, value in (("scheme", scheme), ("group_size", group_size)) if value is not None}
    from qarl.evaluation.request import Request, evaluation_section
    from qarl.inference.target import resolve_target

    found = resolve_target(target, step=step, quant=quant or None, model=model)
    request = Request(tuple(data or ()), samples, ks, temperature, max_response_length, max_prompts, seed)
    section, notes = evaluation_section(found, request)
    wait_politely()
    from qarl.evaluation.command import evaluate_target  # torch: only once the request is known to be good

    results, path = evaluate_target(found, section, not data, out, device, notes)
    _print(results, found.label)
    typer.echo(f"results: {path / 'results.json'}\ncompletions: {path / 'completions.jsonl'}")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--k {text}: must be whole numbers with commas between, as in 1,4") from None


def _print(results: dict[str, Any], label: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from qarl.report.formatting import interval, number, percent

    n, ks = results["samples"], [k for k in results["overall"]["pass"] if k != "1"]  # pass@1 is avg
    table = Table(title=Text(f"{label}: mean [95 % interval]"), title_justify="left")
    table.add_column("task")
    for name in ("prompts", f"avg@{n}", *(f"pass@{k}" for k in ks), "cut off", "tokens"):
        table.add_column(name, justify="right")

    def values(entry: dict[str, Any]) -> list[str]:
        return [interval(**entry["avg"]), *(interval(**entry["pass"][k]) for k in ks)]

    for task in results["tasks"]:
        ends = [percent(task["truncated_frac"]), number(task["length_mean"])]
        table.add_row(task["name"], str(task["prompts"]), *values(task), *ends)
    if len(results["tasks"]) > 1:
        table.add_section()
        table.add_row("mean of tasks", "", *values(results["overall"]))
    Console().print(table)


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
