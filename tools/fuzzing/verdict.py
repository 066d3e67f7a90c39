"""What the outcome of a case means: accepted, refused as it should be, or bad in one of eight ways."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fuzzing.case import GIB, Case
from fuzzing.execute import Outcome

FAULTS = ("traceback", "hang", "signal", "memory", "exit code", "output", "silent", "untrainable")
UNEXPECTED = 70  # of qarl: a fault that it does not know
LONGEST_LINE = 20_000  # characters; a longer line of an error is nothing to read
MEMBER_FAILED = ("compare",)  # commands whose exit code 1 is documented: a member failed, a reader disagrees

_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):", re.MULTILINE)
_FRAME = re.compile(r'File "[^"]*?/((?:qarl|qarl_formats|qarl_kernels)/[^"]+\.py)", line \d+,? in (\w+|<\w+>)')
_RAISED = re.compile(
    r"^((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Iteration|Damaged|Refused|\w+))"
    r"(?::|$)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Verdict:
    """fault: one of `FAULTS` where status is bad. label: what cases of the same class share. detail: one line."""

    status: Literal["accepted", "refused", "bad"]
    fault: str = ""
    label: str = ""
    detail: str = ""


def judge(case: Case, outcome: Outcome) -> Verdict:
    """The worst that can be said of it."""
    texts = []
    for name, data in (("stdout", outcome.out), ("stderr", outcome.err)):
        try:
            texts.append(data.decode("utf-8"))
        except UnicodeDecodeError as error:
            if not data[error.start :].strip() or len(data) - error.start > 3:  # not merely cut at READ_LIMIT
                return Verdict("bad", "output", f"{case.command}: {name} is not UTF-8", f"byte {error.start}")
            texts.append(data.decode("utf-8", "replace"))
    out, err = texts
    if outcome.timed_out:
        return Verdict(
            "bad",
            "hang",
            f"{case.command}: {frame(outcome.stack, first=True)}",
            f"still running after {case.limit_s:g} s",
        )
    for text in (err, out):
        if _TRACEBACK.search(text):
            raised = exception(text)
            return Verdict("bad", "traceback", f"{_kind_of(raised)} in {frame(text)}", raised)
    if outcome.code < 0:
        return Verdict(
            "bad",
            "signal",
            f"{case.command}: signal {-outcome.code} in {frame(outcome.stack, first=True)}",
            f"ended by signal {-outcome.code}",
        )
    if outcome.memory > case.memory_limit:
        held = f"{outcome.memory / GIB:.1f} GiB"
        return Verdict("bad", "memory", f"{case.command}: {_family(case)}", f"held {held} more than at its start")
    if outcome.code == UNEXPECTED:
        return Verdict("bad", "exit code", f"70: {_reported(err)}", _first_error(err))
    strange = _strange(out, err)
    if strange:
        return Verdict("bad", "output", f"{case.command}: {strange}", strange)
    wrong = case.examine(case.cwd) if case.examine else None
    if wrong:
        return Verdict("bad", "silent", f"{case.command}: {wrong}", wrong)
    if outcome.code == 0:
        if case.must_refuse:
            return Verdict("bad", "silent", f"{case.command}: {_family(case)}", "accepted without a word")
        return Verdict("accepted")
    if outcome.code == 2:
        fault = refusal_fault(err, case.reads_only)
        return Verdict("bad", "output", f"{case.command}: {fault}", fault) if fault else Verdict("refused")
    if outcome.code == 1 and case.command in MEMBER_FAILED:
        return Verdict("refused")
    return Verdict(
        "bad",
        "exit code",
        f"{case.command}: exit code {outcome.code}: {_first_error(err)[:60]}",
        f"exit code {outcome.code}",
    )


def refusal_fault(err: str, reads_only: bool) -> str | None:
    """What is wrong with the stderr of a refusal; None if it is lines `error: ...`, or the usage of an option.

    Commands that run a model may have said what they were doing before.
    """
    if err.lstrip().startswith(("Usage:", "\u256d\u2500 Error")):  # typer's own, in a box
        return None if "Error" in err else "a usage without an error"
    lines = [line for line in err.splitlines() if line]
    if not any(line.startswith("error: ") for line in lines):
        return "no line `error: ...`"
    if reads_only and not all(line.startswith("error: ") for line in lines):
        return "a line that is no error"
    if not lines[-1].startswith("error: "):
        return "the last line is no error"
    if any(not line.removeprefix("error: ").strip() for line in lines):
        return "an empty error"
    return None


def frame(text: str, first: bool = False) -> str:
    """`qarl/file.py:function` of the innermost frame of qarl's own. first: of a stack that begins with it."""
    frames = _FRAME.findall(text)
    if not frames:
        return "no frame of qarl"
    file, function = frames[0 if first else -1]
    return f"{file}:{function}"


def exception(text: str) -> str:
    """The last line of a traceback that names an exception."""
    tail = text[text.rindex("Traceback (most recent call last):") :]
    for line in tail.splitlines()[1:]:
        if not line.startswith(" ") and _RAISED.match(line):
            return line[:300]
    return "unknown exception"


def _reported(err: str) -> str:
    """What the traceback says that a fault of qarl's own was saved to."""
    named = re.search(r"traceback in (\S+)", err)
    path = Path(named[1]) if named else None
    if path is None or not path.is_file():
        return _first_error(err)
    text = path.read_text(errors="replace")
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


def _family(case: Case) -> str:
    """The mutation without its particulars."""
    return case.mutation.split(":")[0]
