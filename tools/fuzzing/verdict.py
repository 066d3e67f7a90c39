"""The verdict on a case, the description of a bad case, and the counts of a series."""

import re
import shlex
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from fuzzing.case import Case, Outcome
from fuzzing.values import shown
from harness import aligned, environment

FAULTS = ("traceback", "hang", "signal", "exit code", "output", "silent", "untrainable")
LONGEST_LINE = 20_000  # characters; a longer error line counts as unreadable
MEMBER_FAILED = ("compare",)  # commands whose exit code 1 is documented: a member failed, a reader disagrees
TRACEBACK = re.compile(r"^Traceback \(most recent call last\):", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a case. fault: One of `FAULTS` if status is bad. detail: One line."""

    status: Literal["accepted", "refused", "bad"]
    fault: str = ""
    detail: str = ""


def judge(case: Case, outcome: Outcome) -> Verdict:
    """Return the verdict on a case: the first fault that applies, or whether it was accepted or refused."""
    err, out = (data.decode(errors="surrogateescape") for data in (outcome.err, outcome.out))
    if outcome.timed_out:
        return Verdict("bad", "hang", f"more than {case.limits[0]:g} s")
    if TRACEBACK.search(err) or TRACEBACK.search(out):
        return Verdict("bad", "traceback", "a traceback was printed")
    if outcome.code < 0:
        return Verdict("bad", "signal", f"signal {-outcome.code}")
    for char in sorted(set(out + err) - {"\n", "\t"}):  # would control a terminal, or is not UTF-8
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            return Verdict("bad", "output", f"U+{ord(char):04X}")
    if outcome.code == 0:
        return Verdict("bad", "silent", "accepted without a word") if case.must_refuse else Verdict("accepted")
    if outcome.code == 1 and case.command in MEMBER_FAILED:
        return Verdict("refused")
    if outcome.code != 2:
        return Verdict("bad", "exit code", f"exit code {outcome.code}")
    fault = refusal_fault(err, case.reads_only)
    return Verdict("bad", "output", fault) if fault else Verdict("refused")


def refusal_fault(err: str, reads_only: bool) -> str | None:
    """Return what is wrong with the stderr of a refusal; None if it has lines `error: ...`, or a usage message.

    Commands that run a model may print status lines before.
    """
    if err.lstrip().startswith(("Usage:", "\u256d\u2500 Error")):  # typer's own, in a box
        return None
    lines = [line for line in err.splitlines() if line]
    errors = [line for line in lines if re.match(r"error: \S", line)]
    if not errors or lines[-1] != errors[-1]:
        return "the last line is not an error"
    if reads_only and errors != lines:
        return "a line is not an error"
    return "a line too long to read" if max(map(len, lines)) > LONGEST_LINE else None


@dataclass(frozen=True)
class Result:
    case: Case
    outcome: Outcome
    verdict: Verdict


def describe(seed: str, result: Result, lines: int = 8) -> str:
    """Describe a bad case: how to run it again, the mutation, the command line, the last lines of its output."""
    case, outcome, verdict = result.case, result.outcome, result.verdict
    text = (outcome.out + b"\n" + outcome.err).decode(errors="replace")
    last = [line for line in text.splitlines() if line.strip()][-lines:]
    last += outcome.stack.splitlines()[:lines]  # the innermost frames come first
    return "\n".join(
        [
            f"{verdict.status.upper()} {verdict.fault}  --seed {seed} --only {case.name}  {shown(verdict.detail, 300)}",
            f"  mutation: {shown(case.mutation, 300)}",
            f"  qarl {shown(shlex.join(case.argv), 400)}",
            f"  exit code {outcome.code}, {outcome.seconds:.1f} s",
            *(f"  | {shown(line, 200)}" for line in last),
        ]
    )


class Tally:
    """Counts by kind and by command, and the bad cases."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.counts: dict[str, Counter[str]] = {}  # kind, `qarl COMMAND` or `all` -> counts, and wall seconds
        self.bad: list[str] = []

    def add(self, result: Result) -> None:
        """Count one result."""
        case, verdict = result.case, result.verdict
        for name in (case.kind, f"qarl {case.command if case.command.isalpha() else '-'}", "all"):
            counts = self.counts.setdefault(name, Counter())
            counts.update(["cases", verdict.status, *filter(None, [verdict.fault])])
            counts["seconds"] += result.outcome.seconds
        if verdict.status == "bad":
            self.bad.append(describe(self.seed, result))

    def table(self) -> str:
        """Return the counts as text."""
        columns = ["cases", "accepted", "refused", "bad", *FAULTS, "seconds"]
        groups = sorted(self.counts.items(), key=lambda group: (group[0] == "all", group[0].startswith("qarl"), group))
        rows = [[name, *(f"{counts[column]:.0f}" for column in columns)] for name, counts in groups]
        return "\n".join(aligned([["", *columns], *rows]))

    def record(self, command: str, seconds: float) -> dict[str, Any]:
        """Return counts and bad cases as JSON values."""
        about = {"command": command, "environment": environment(), "seed": self.seed, "seconds": seconds}
        return about | {"counts": self.counts, "bad": self.bad}
