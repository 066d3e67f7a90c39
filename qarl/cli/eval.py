"""`qarl eval`: sample responses to evaluation prompts, and score them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qarl import api
from qarl.cli import options
from qarl.cli.arguments import option, path_of, template_object
from qarl.config.evaluation_presets import PRESETS
from qarl.config.messages import shown
from qarl.errors import UserError
from qarl.inputs.limits import ITEMS, ROWS


def evaluate(
    target: options.Policy,
    data: Annotated[
        list[str] | None,
        option(
            "--data",
            "NAME[=PATH]",
            f"Data set ({', '.join(PRESETS)}), from the hub or a local file with the same columns. Repeatable. "
            "Default: the run's evaluation.tasks, or else its training data.",
        ),
    ] = None,
    scheme: options.Scheme = None,
    group_size: options.GroupSize = None,
    kv_cache_dtype: options.KVCache = None,
    samples: Annotated[int | None, typer.Option(help="Responses per prompt. Default: 4, or 1 if greedy.")] = None,
    k: Annotated[
        str | None, typer.Option(help="Values of k for pass@k, such as 1,4. Default: 1 and --samples.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy. Default: 1.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            help="Apply the chat template. Default: as in training for a run or its export, and for other models "
            "if they have one; without --data, as configured per task.",
        ),
    ] = None,
    system: Annotated[
        str | None,
        option("--system", "TEXT", "System message. Default: with --data, the run's data.system_prompt."),
    ] = None,
    chat_template_kwargs: options.TemplateKwargs = None,
    max_response_length: Annotated[
        int | None,
        typer.Option(help="Maximum tokens per response. Default: as configured in the run; 1024 with --data."),
    ] = None,
    max_prompts: Annotated[
        int | None, typer.Option(min=1, max=ROWS, help="Use only the first prompts of each set.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Random seed. Default: 0.")] = None,
    step: options.Step = None,
    model: options.MovedModel = None,
    verify_digests: options.VerifyDigests = True,
    out: Annotated[
        Path | None, option("--out", "DIR", "Results directory. Default: RUN/eval/... or eval/...", path_of)
    ] = None,
    device: options.Device = "auto",
) -> None:
    """Evaluate a quantized policy: avg@k and pass@k with 95 % confidence intervals. Rerun to resume."""
    ks = None if k is None else _numbers(k)
    found = api.evaluate(
        target,
        data or (),
        scheme=scheme,
        group_size=group_size,
        kv_cache_dtype=kv_cache_dtype,
        samples=samples,
        pass_at=ks,
        temperature=temperature,
        chat=chat,
        system=system,
        chat_template_kwargs=template_object(chat_template_kwargs),
        max_response_length=max_response_length,
        max_prompts=max_prompts,
        seed=seed,
        step=step,
        model=model,
        verify_digests=verify_digests,
        out=out,
        device=device,
    )
    _print(found.results)
    typer.echo(f"results: {found.path / 'results.json'}\ncompletions: {found.path / 'completions.jsonl'}")


def _numbers(text: str) -> tuple[int, ...]:
    """Parse --k; the evaluation section checks the values against --samples."""
    parts = [part.strip() for part in text.split(",", ITEMS)]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 9 for part in parts):
        raise UserError(f"--k {shown(text)}: must be comma-separated whole numbers, such as 1,4")
    return tuple(map(int, parts))


def _print(results: dict[str, Any]) -> None:
    from qarl.report.blocks import Column, Table
    from qarl.report.formatting import interval, number, percent
    from qarl.terminal.console import print_table, table_console

    n, ks = results["samples"], [k for k in results["overall"]["pass"] if k != "1"]  # pass@1 is avg
    at = "" if results["step"] is None else f" step {results['step']}"
    cache = ", FP8 KV cache" if results["kv_cache_dtype"] == "fp8" else ""
    label = f"{results['target']}{at}, {results['scheme']}{cache}"
    heads = ("prompts", f"avg@{n}", *(f"pass@{k}" for k in ks), "cut off", "tokens")

    def values(entry: dict[str, Any]) -> list[str]:
        return [interval(**entry["avg"]), *(interval(**entry["pass"][k]) for k in ks)]

    rows = [
        [t["name"], str(t["prompts"]), *values(t), percent(t["truncated_frac"]), number(t["length_mean"])]
        for t in results["tasks"]
    ]
    if len(rows) > 1:
        rows.append(["mean of tasks", "", *values(results["overall"]), "", ""])
    columns = [Column("task"), *(Column(head, "right") for head in heads)]
    print_table(Table(columns, rows, f"{label}: mean [95 % interval]"), table_console())
