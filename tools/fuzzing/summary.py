"""What is printed of a bad case, and the counts of a series."""

from __future__ import annotations

import platform
import shlex
from collections import Counter
from importlib import metadata
from typing import Any

from fuzzing.series import Result
from fuzzing.values import shown
from fuzzing.verdict import FAULTS

PACKAGES = ("torch", "transformers", "pydantic", "pyyaml", "safetensors")


def describe(seed: str, result: Result, lines: int = 8) -> str:
    """A bad case: how to run it again, what was mutated, the command line, the last lines of its output."""
    case, outcome, verdict = result.case, result.outcome, result.verdict
    text = (outcome.out + b"\n" + outcome.err).decode(errors="replace")
    last = [shown(line, 200) for line in text.splitlines() if line.strip()][-lines:]
    last += [shown(line, 200) for line in outcome.stack.splitlines()[:lines]]  # the innermost frames come first
    return "\n".join(
        [
            f"{verdict.status.upper()} {verdict.fault}  --seed {seed} --only {case.name}  {verdict.label}",
            f"  mutation: {shown(case.mutation, 300)}",
            f"  qarl {shown(shlex.join(case.argv), 400)}",
            f"  exit code {outcome.code}, {outcome.seconds:.1f} s, {outcome.memory / 2**20:.0f} MiB",
            *(f"  | {line}" for line in last),
        ]
    )


class Tally:
    """Counts by kind and by command, and the classes of what is bad."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self._kinds: dict[str, Counter[str]] = {}  # among the counts: wall seconds
        self._commands: dict[str, Counter[str]] = {}
        self._classes: dict[tuple[str, str], dict[str, Any]] = {}

    @property
    def bad(self) -> int:
        """Cases that are."""
        return sum(counts["bad"] for counts in self._kinds.values())

    def add(self, result: Result) -> None:
        """Count one."""
        case, verdict = result.case, result.verdict
        for table, key in ((self._kinds, case.kind), (self._commands, case.command if case.command.isalpha() else "-")):
            counts = table.setdefault(key, Counter())
            counts["cases"] += 1
            counts[verdict.status] += 1
            counts["seconds"] += result.outcome.seconds
            if verdict.fault:
                counts[verdict.fault] += 1
        if verdict.status == "bad":
            first = {
                "fault": verdict.fault,
                "class": shown(verdict.label, 200),
                "cases": 0,
                "first": case.name,
                "mutation": shown(case.mutation, 300),
                "argv": shown(shlex.join(case.argv), 300),
                "detail": shown(verdict.detail, 300),
            }
            entry = self._classes.setdefault((verdict.fault, verdict.label), first)
            entry["cases"] += 1

    def classes(self) -> list[dict[str, Any]]:
        """The distinct faults, the most frequent first, each with its first case."""
        return sorted(self._classes.values(), key=lambda entry: -entry["cases"])

    def table(self) -> str:
        """The counts as text."""
        head = ["", "cases", "accepted", "refused", "bad", *FAULTS, "seconds"]
        rows = [head]
        for table in (self._kinds, self._commands):
            rows += [[name, *(f"{table[name][column]:.0f}" for column in head[1:])] for name in sorted(table)]
            rows.append([])
        total = sum(self._kinds.values(), Counter())
        rows.append(["all", *(f"{total[column]:.0f}" for column in head[1:])])
        widths = [max(len(row[i]) for row in rows if row) for i in range(len(head))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in rows)

    def record(self, command: str, seconds: float) -> dict[str, Any]:
        """The counts as JSON."""
        versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
        total = sum(self._kinds.values(), Counter())
        return {
            "command": command,
            "versions": versions,
            "seed": self.seed,
            "seconds": seconds,
            "total": dict(total),
            "kinds": {name: dict(counts) for name, counts in sorted(self._kinds.items())},
            "commands": {name: dict(counts) for name, counts in sorted(self._commands.items())},
            "classes": self.classes(),
        }
