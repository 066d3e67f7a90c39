"""What is printed of a bad case, and the counts of a series."""

from __future__ import annotations

import platform
import shlex
from collections import Counter, defaultdict
from importlib import metadata
from typing import Any

from fuzzing.series import Result
from fuzzing.values import shown
from fuzzing.verdict import FAULTS

PACKAGES = ("torch", "transformers", "pydantic", "pyyaml", "safetensors", "hypothesis")


def describe(seed: str, result: Result, lines: int = 8) -> str:
    """A bad case: how to run it again, what was mutated, the command line, the last lines of its output."""
    case, outcome, verdict = result.case, result.outcome, result.verdict
    text = (outcome.out + b"\n" + outcome.err).decode(errors="replace")
    last = [line for line in text.splitlines() if line.strip()][-lines:]
    last += outcome.stack.splitlines()[:lines]  # the innermost frames come first
    return "\n".join(
        [
            f"{verdict.status.upper()} {verdict.fault}  --seed {seed} --only {case.name}  {verdict.label}",
            f"  mutation: {shown(case.mutation, 300)}",
            f"  qarl {shown(shlex.join(case.argv), 400)}",
            f"  exit code {outcome.code}, {outcome.seconds:.1f} s, {outcome.memory / 2**20:.0f} MiB",
            *(f"  | {shown(line, 200)}" for line in last),
        ]
    )


class Tally:
    """Counts by kind and by command, and the classes of what is bad."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self._kinds: dict[str, Counter[str]] = defaultdict(Counter)  # among the counts: wall seconds
        self._commands: dict[str, Counter[str]] = defaultdict(Counter)
        self._classes: dict[tuple[str, str], dict[str, Any]] = {}

    @property
    def bad(self) -> int:
        return self._total["bad"]

    @property
    def _total(self) -> Counter[str]:
        return sum(self._kinds.values(), Counter())

    def add(self, result: Result) -> None:
        """Count one."""
        case, verdict = result.case, result.verdict
        for counts in (self._kinds[case.kind], self._commands[case.command if case.command.isalpha() else "-"]):
            counts.update(["cases", verdict.status, *filter(None, [verdict.fault])])
            counts["seconds"] += result.outcome.seconds
        if verdict.status == "bad":
            texts = {"class": verdict.label, "mutation": case.mutation, "detail": verdict.detail}
            first = {"fault": verdict.fault, "first": case.name, "argv": shown(shlex.join(case.argv), 300), "cases": 0}
            first |= {name: shown(text, 300) for name, text in texts.items()}
            self._classes.setdefault((verdict.fault, verdict.label), first)["cases"] += 1

    def table(self) -> str:
        """The counts as text."""
        columns = ["cases", "accepted", "refused", "bad", *FAULTS, "seconds"]
        rows = [["", *columns]]
        for name, counts in [*sorted(self._kinds.items()), *sorted(self._commands.items()), ("all", self._total)]:
            rows.append([name, *(f"{counts[column]:.0f}" for column in columns)])
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def record(self, command: str, seconds: float) -> dict[str, Any]:
        """The counts as JSON. classes: the distinct faults, the most frequent first, each with its first case."""
        return {
            "command": command,
            "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
            "seed": self.seed,
            "seconds": seconds,
            "total": dict(self._total),
            "kinds": {name: dict(counts) for name, counts in sorted(self._kinds.items())},
            "commands": {name: dict(counts) for name, counts in sorted(self._commands.items())},
            "classes": sorted(self._classes.values(), key=lambda entry: -entry["cases"]),
        }
