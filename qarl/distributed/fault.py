"""The fault that ended a run on several ranks, and its file fault.json. Imports no torch."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from qarl.errors import UNEXPECTED, UserError, machine_fault
from qarl.utils.signals import Interrupted

FAULT = "fault.json"
OTHER_RANK = 75  # exit code if another rank failed (EX_TEMPFAIL of sysexits.h)
INTERRUPTED = tuple(128 + s for s in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))  # exit codes after a stop signal

_LONGEST = 2000  # characters of a line


@dataclass(frozen=True)
class Fault:
    """The failure of one rank.

    Attributes:
        rank, host: The rank that failed, and its host.
        code: Its exit code as a shell reports it; None if it has none.
        line: One line that describes the failure.
    """

    rank: int
    host: str
    code: int | None
    line: str

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Fault:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.line}"


class OtherRankFailed(Exception):
    """Raised if another rank failed; the process ends with exit code 75 (EX_TEMPFAIL)."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def fault_of(rank: int, error: BaseException) -> Fault:
    """Return the fault of this process, which ends with `error`."""
    return Fault(rank, host(), exit_code(error), described(error))


def fault_behind(rank: int, error: BaseException) -> Fault:
    """Return the cause of `error`: another rank's fault, or `fault_of` this process."""
    return error.fault if isinstance(error, OtherRankFailed) else fault_of(rank, error)


def described(error: BaseException) -> str:
    """Return the message of `error`, with its type if it is an internal error."""
    text = str(error).strip()
    if not isinstance(error, (UserError, OtherRankFailed)):
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return text[:_LONGEST]


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with `error`; see `qarl.cli.main`.

    SystemExit counts as an internal error, whatever its code: 0 would claim that the run is complete.
    """
    if isinstance(error, UserError):
        return 2
    if isinstance(error, OtherRankFailed):
        return OTHER_RANK
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, Interrupted):
        return error.exit_code
    return UNEXPECTED if isinstance(error, Exception) and machine_fault(error) is None else 2


def host() -> str:
    return socket.gethostname()


def write_fault(run_dir: Path, fault: Fault) -> None:
    """Write `fault` to a run directory that has begun. Keeps an existing fault, because the first one ended the run.

    Best effort: a full disk is ignored.
    """
    if not (run_dir / "config.yaml").exists():
        return
    with suppress(OSError):
        fd = os.open(run_dir / FAULT, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "w") as file:
            file.write(json.dumps({"format_version": 1, **asdict(fault)}, indent=2) + "\n")


def forget_fault(run_dir: Path) -> None:
    """Remove the fault of an earlier start."""
    with suppress(OSError):
        (run_dir / FAULT).unlink(missing_ok=True)
