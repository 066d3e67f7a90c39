"""`qarl runs`: list the runs in a directory."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from qarl.cli.arguments import argument
from qarl.storage.runs import METRICS, RunRecord, find_runs
from qarl.utils.text import visible


def runs(
    root: Annotated[Path, argument("ROOT", "Directory to search recursively.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List runs with state, step and reward. Does not load torch."""
    records, problems = find_runs(root)
    rows = [summary(record, root) for record in records]
    if as_json:
        typer.echo(json.dumps({"runs": rows, "problems": problems}, indent=2))
        return
    _print_table(rows, root)
    for problem in problems:
        print(f"unreadable: {visible(problem)}", file=sys.stderr)


def summary(record: RunRecord, root: Path) -> dict[str, Any]:
    """Return one run's entry for JSON. `age_s` is the time since its last step, or since its start."""
    evaluation: Any = record.evaluations[-1] if record.evaluations else {}
    for key in ("overall", "avg", "mean"):
        evaluation = evaluation.get(key) if isinstance(evaluation, dict) else None
    config = record.config
    newest = record.path / METRICS
    changed = (newest if newest.exists() else record.path / "config.yaml").stat().st_mtime
    return {
        "name": str(record.path.relative_to(root)) if record.path != root else record.path.resolve().name,
        "path": str(record.path),
        "state": record.state,
        "step": record.step,
        "steps": config.train.steps,
        "scheme": config.quant.scheme,
        "kv_cache_dtype": config.quant.kv_cache_dtype,
        "learner": config.quant.learner,
        "objective": config.objective.name,
        "reward": record.metrics[-1].get("reward/mean") if record.metrics else None,
        "eval": evaluation,
        "age_s": max(0.0, time.time() - changed),
    }


def _print_table(rows: list[dict[str, Any]], root: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from qarl.report.formatting import number
    from qarl.terminal.console import table_console

    if not rows:
        typer.echo(f"no runs in {root}")
        return
    console = table_console()
    columns = ["run", "state", "step", "scheme", "learner", "objective", "reward", "eval", "age"]
    if console.width < 100:
        columns = [name for name in columns if name not in ("objective", "age")]
    longest = max(len(row["name"]) for row in rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in ("step", "reward", "eval", "age") else "left",
            no_wrap=name not in ("run", "learner"),
            overflow="fold",
            min_width=min(20, longest) if name == "run" else None,
        )
    for row in rows:
        cells = row | {
            "run": row["name"],
            "step": f"{row['step']}/{row['steps']}",
            "scheme": row["scheme"] + ", FP8 KV" * (row["kv_cache_dtype"] == "fp8"),
            "reward": number(row["reward"]),
            "eval": number(row["eval"]),
            "age": _age(row["age_s"]),
        }
        table.add_row(*(Text(visible(cells[name])) for name in columns))
    console.print(table)


def _age(elapsed: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if elapsed >= 2 * length:
            return f"{elapsed // length:.0f} {unit}"
    return f"{elapsed:.0f} s"
