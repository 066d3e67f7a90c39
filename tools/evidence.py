#!/usr/bin/env python3
"""Read the runs of configs/evidence: which tasks the starting policy answers.

python tools/evidence.py ladder runs/evidence_sft      # answered by family and level, for every evaluation of the run
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from process_tree import SOURCES

sys.path[:0] = SOURCES

Row = dict[str, Any]


def read_lines(path: Path) -> list[Row]:
    """The objects of a JSON-lines file. Raises SystemExit if it cannot be read."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        sys.exit(f"error: {path}: {error}; name a file that qarl or tools/make_traces.py wrote")


def with_sizes(completions: Sequence[Row], tasks: Sequence[Row]) -> list[Row]:
    """Completions of an evaluation with `family` and `level` of the task that they answer.

    Args:
        completions: Lines of evaluations/NNNNNN.jsonl or completions.jsonl.
        tasks: Lines of the file that the evaluation read; `prompt_id` counts them from 0.
    """
    found = []
    for row in completions:
        task = tasks[row["prompt_id"]] if row["prompt_id"] < len(tasks) else None
        if task is None or task["prompt"] not in row["prompt"]:
            sys.exit(
                f"error: prompt {row['prompt_id']} is not that of the evaluation; the file of its tasks has changed"
            )
        found.append(row | {"family": task["family"], "level": task["level"]})
    return found


def ladder_table(rows: Sequence[Row]) -> str:
    """Markdown: the share of right answers by family and level, with the share of truncated responses."""
    cells: dict[tuple[str, int | str], list[Row]] = defaultdict(list)
    for row in rows:
        for family in (row["family"], "all"):
            for level in (row["level"], "all"):
                cells[family, level].append(row)
    families = [*dict.fromkeys(row["family"] for row in rows), "all"]
    levels = [*sorted({row["level"] for row in rows}), "all"]

    def share(found: Sequence[Row]) -> str:
        return f"{sum(row['correct'] for row in found) / len(found):.0%} of {len(found)}" if found else ""

    lines = [
        "| | " + " | ".join(f"level {level}" for level in levels) + " | truncated |",
        "| --- " * (len(levels) + 2) + "|",
    ]
    for family in families:
        cut = sum(row["finish_reason"] == "length" for row in cells[family, "all"]) / len(cells[family, "all"])
        lines.append(f"| {family} | " + " | ".join(share(cells[family, level]) for level in levels) + f" | {cut:.0%} |")
    return "\n".join(lines)


def show_ladder(options: argparse.Namespace) -> int:
    from qarl.storage.runs import read_run

    record = read_run(options.run)
    sources = {str(task.name): Path(task.dataset.source) for task in record.config.evaluation.tasks}
    files = sorted((options.run / "evaluations").glob("*.jsonl")) + sorted(options.run.glob("eval/*/completions.jsonl"))
    if not files:
        sys.exit(f"error: {options.run}: no evaluation; run qarl eval {options.run}")
    for path in files:
        rows = read_lines(path)
        for name in dict.fromkeys(row["task"] for row in rows):
            sized = with_sizes([row for row in rows if row["task"] == name], read_lines(sources[name]))
            print(f"{path.relative_to(options.run)}, task {name}\n\n{ladder_table(sized)}\n")
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    ladder = commands.add_parser("ladder", help="answered tasks by family and level")
    ladder.add_argument("run", type=Path, help="a run whose evaluation tasks are files of tools/make_traces.py")
    ladder.set_defaults(action=show_ladder)
    return parser.parse_args(arguments)


def main() -> int:
    from qarl.errors import UserError

    options = parse()
    try:
        return options.action(options)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    raise SystemExit(main())
