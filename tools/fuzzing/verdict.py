"""What the outcome of a case means, what is printed of a bad case, and the counts of a series."""

import platform
import re
import shlex
import unicodedata
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from fuzzing.case import GIB, Case, Outcome
from fuzzing.values import shown
from harness import aligned

PACKAGES = ("torch", "transformers", "pydantic", "pyyaml", "safetensors", "hypothesis")
FAULTS = ("traceback", "hang", "signal", "memory", "exit code", "output", "silent", "untrainable")
UNEXPECTED = 70  # exit code of qarl for a fault that it does not know
LONGEST_LINE = 20_000  # characters; nobody reads a longer line of an error
MEMBER_FAILED = ("compare",)  # commands whose exit code 1 is documented: a member failed, a reader disagrees

_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):", re.MULTILINE)
_FRAME = re.compile(r'File "[^"]*?/((?:qarl|qarl_formats|qarl_kernels)/[^"]+\.py)", line \d+,? in (\w+|<\w+>)')
_RAISED = re.compile(r"^(?:\w+\.)*[A-Z]\w+(?::|$)")


@dataclass(frozen=True)
class Verdict:
    """fault: one of `FAULTS` if status is bad. label: what cases of the same class share. detail: one line."""

    status: Literal["accepted", "refused", "bad"]
    fault: str = ""
    label: str = ""
    detail: str = ""


def judge(case: Case, outcome: Outcome) -> Verdict:
    """The worst that can be said of it."""

    def bad(fault: str, detail: str, label: str = "") -> Verdict:
        return Verdict("bad", fault, label or f"{case.command}: {detail}", detail)

    texts = []
    for name, data in (("stderr", outcome.err), ("stdout", outcome.out)):
        try:
            texts.append(data.decode("utf-8"))
        except UnicodeDecodeError as error:
            if len(data) - error.start > 3:  # not merely cut at READ_LIMIT
                return bad("output", f"{name} is not UTF-8")
            texts.append(data.decode("utf-8", "replace"))
    err, out = texts
    family = f"{case.command}: {case.mutation.split(':')[0]}"
    stopped = frame(outcome.stack, first=True)
    if outcome.timed_out:
        return bad("hang", f"still running after {case.limit_s:g} s", f"{case.command}: {stopped}")
    for text in texts:
        if _TRACEBACK.search(text):
            raised = exception(text)
            return bad("traceback", raised, f"{_kind_of(raised)} in {frame(text)}")
    if outcome.code < 0:
        return bad("signal", f"signal {-outcome.code} in {stopped}")
    if outcome.memory > case.memory_limit:
        return bad("memory", f"held {outcome.memory / GIB:.1f} GiB more than at its start", family)
    if outcome.code == UNEXPECTED:
        return bad("exit code", _first_error(err), f"70: {_reported(err)}")
    if strange := _strange(out, err):
        return bad("output", strange)
    if outcome.code == 0:
        return bad("silent", "accepted without a word", family) if case.must_refuse else Verdict("accepted")
    if outcome.code == 2:
        fault = refusal_fault(err, case.reads_only)
        return bad("output", fault) if fault else Verdict("refused")
    if outcome.code == 1 and case.command in MEMBER_FAILED:
        return Verdict("refused")
    return bad("exit code", f"exit code {outcome.code}: {_first_error(err)[:60]}")


def refusal_fault(err: str, reads_only: bool) -> str | None:
    """What is wrong with the stderr of a refusal; None if it is lines `error: ...`, or the usage of an option.

    Commands that run a model may have said what they were doing before.
    """
    if err.lstrip().startswith(("Usage:", "\u256d\u2500 Error")):  # typer's own, in a box
        return None if "Error" in err else "a usage without an error"
    lines = [line for line in err.splitlines() if line]
    errors = [line for line in lines if line.startswith("error: ")]
    if not errors:
        return "no line `error: ...`"
    if reads_only and errors != lines:
        return "a line that is no error"
    if lines[-1] != errors[-1]:
        return "the last line is no error"
    return None if all(line.removeprefix("error: ").strip() for line in errors) else "an empty error"


def frame(text: str, first: bool = False) -> str:
    """`qarl/file.py:function` of the innermost frame of qarl's own. first: of a stack that begins with it."""
    frames = _FRAME.findall(text)
    return ":".join(frames[0 if first else -1]) if frames else "no frame of qarl"


def exception(text: str) -> str:
    """The first line after a traceback's frames that names an exception."""
    tail = text[text.rindex("Traceback (most recent call last):") :]
    return next((line[:300] for line in tail.splitlines()[1:] if _RAISED.match(line)), "unknown exception")


def _reported(err: str) -> str:
    """The class of the traceback that qarl saved of a fault of its own."""
    named = re.search(r"traceback in (\S+)", err)
    text = Path(named[1]).read_text(errors="replace") if named and Path(named[1]).is_file() else ""
    return f"{_kind_of(exception(text))} in {frame(text)}" if _TRACEBACK.search(text) else _first_error(err)


def _kind_of(raised: str) -> str:
    """The exception and its message without what differs from case to case."""
    return re.sub(r"['\"`].*?['\"`]|\d+|0x\w+", "...", raised)[:90]


def _strange(out: str, err: str) -> str | None:
    """Characters that drive a terminal, or lines beyond reading."""
    for name, text in (("stdout", out), ("stderr", err)):
        for char in sorted(set(text) - {"\n", "\t"}):
            if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
                return f"U+{ord(char):04X} on {name}"
    if max(map(len, err.splitlines()), default=0) > LONGEST_LINE:
        return f"a line of more than {LONGEST_LINE} characters on stderr"
    return None


def _first_error(err: str) -> str:
    lines = err.splitlines() or ["nothing on stderr"]
    return next((line for line in lines if line.startswith("error: ")), lines[-1])[:300]


@dataclass(frozen=True)
class Result:
    case: Case
    outcome: Outcome
    verdict: Verdict


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
        groups = [*sorted(self._kinds.items()), *sorted(self._commands.items()), ("all", self._total)]
        rows = [[name, *(f"{counts[column]:.0f}" for column in columns)] for name, counts in groups]
        return "\n".join(aligned([["", *columns], *rows]))

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
