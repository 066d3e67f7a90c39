"""`tools/fuzz.py` itself: planted faults are found and named, cases repeat, and the summary counts them."""

import hashlib
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzzing.case as fuzzing_case
import pytest
from fuzzing.base import write_inputs
from fuzzing.case import Case, Outcome, execute
from fuzzing.configs import schema_keys
from fuzzing.damage import seal
from fuzzing.series import build, names
from fuzzing.verdict import Result, Tally, judge
from process_tree import runs


def refuse(*lines: str, code: int = 2) -> None:
    for line in lines:
        print(line, file=sys.stderr)
    raise SystemExit(code)


def ignore_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    time.sleep(1000)


def raise_a_fault() -> None:
    raise KeyError("planted")


def print_and_end(text: str, code: int = 0) -> None:
    print(text)
    raise SystemExit(code)


# Command, and its verdict: status and fault.
PLANTED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "accepted": (lambda: None, "accepted", ""),
    "refused in a line": (lambda: refuse("error: c.yaml: no such file; give another"), "refused", ""),
    "traceback": (raise_a_fault, "bad", "traceback"),
    "hang that ignores signals": (ignore_signals, "bad", "hang"),
    "signal": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "bad", "signal"),
    # mmap, because memory that this process had freed would be enough for a bytearray
    "memory": (lambda: mmap.mmap(-1, 200_000_000), "bad", "traceback"),
    "exit code 1": (lambda: print_and_end("", 1), "bad", "exit code"),
    "escape": (lambda: print_and_end("\x1b[31mred"), "bad", "output"),
    "bytes": (lambda: (os.write(1, b"\xff\xfe abc\n"), sys.exit(0)), "bad", "output"),
    "refused without a reason": (lambda: refuse(), "bad", "output"),
    "a line without end": (lambda: refuse("error: " + "x" * 100_000), "bad", "output"),
}


def run(directory: Path, command: Callable[[], object], **about: Any):
    """The verdict on a command that takes a second at most."""
    case = Case("config-0", directory, "planted: a fault", ["check", "c.yaml"], **about)
    case.cwd.mkdir(parents=True)
    return case, judge(case, execute(case, lambda argv: command()))


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds and 128 MiB for a command that only reads."""
    monkeypatch.setattr(fuzzing_case, "READING", (2.0, 2**27))
    monkeypatch.setattr(fuzzing_case, "PATIENCE", 1)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, short_limit: None) -> None:
    command, status, fault = PLANTED[name]
    _, verdict = run(tmp_path, command)
    assert (verdict.status, verdict.fault) == (status, fault), verdict


def test_an_accepted_case_is_silent_if_it_must_be_refused(tmp_path: Path) -> None:
    _, verdict = run(tmp_path, lambda: None, must_refuse=True)
    assert (verdict.status, verdict.fault) == ("bad", "silent")


def test_what_a_case_started_ends_with_it(tmp_path: Path) -> None:
    def command() -> None:
        if pid := os.fork():
            Path("child").write_text(str(pid))
            return
        time.sleep(1000)

    case, _ = run(tmp_path, command)
    pid = int((case.cwd / "child").read_text())
    deadline = time.monotonic() + 60
    while runs(pid):
        assert time.monotonic() < deadline, "a child of the case lives on"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the mutators of configurations and data read."""
    root = tmp_path_factory.mktemp("base")
    write_inputs(root)
    (root / "model").mkdir()
    return root


def contents(directory: Path) -> dict[str, object]:
    """Every entry below it: bytes of files, targets of links, kinds of others."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        content = path.read_bytes if path.is_file() else lambda: path.lstat().st_mode  # noqa: B023 - called at once
        found[str(path.relative_to(directory))] = os.readlink(path) if path.is_symlink() else content()
    return found


@pytest.mark.parametrize("kind", ["config", "valid"])
def test_a_case_is_the_same_whenever_it_is_built(kind: str, base: Any, tmp_path: Path) -> None:
    different = set()
    for number in range(6):
        made = []
        for order in (1, 2):
            random.seed(order)  # which no mutator may use
            case = build("7", f"{kind}-{number}", base, tmp_path / "case")
            made.append((case.mutation, case.argv, case.must_refuse, contents(case.directory)))
            case.remove()
        assert made[0] == made[1]
        different.add(case.mutation)
    assert len(different) > 4, "the cases of a series are all alike"


def test_cases_do_not_depend_on_their_number_and_reach_every_key() -> None:
    every = list(names("3", 400))
    assert len(set(every)) == 400 and {name.rpartition("-")[0] for name in every} == {"config", "run", "model"}
    assert every[:50] == list(names("3", 50)) and every != list(names("4", 400))
    keys = {".".join(map(str, path)) for path in schema_keys()}
    assert {"train.steps", "reward.functions.0.weight", "rollout.vllm.memory_frac"} <= keys
    assert {"correction.reject.0.upper", "evaluation.tasks.0.data.source"} <= keys


def test_the_summary_counts_what_was_found(tmp_path: Path, short_limit: None) -> None:
    tally = Tally("9")
    for number, name in enumerate(("accepted", "refused in a line", "traceback", "traceback", "signal")):
        case, verdict = run(tmp_path / str(number), PLANTED[name][0])
        tally.add(Result(case, Outcome(0, False, 0.5, b"", b"KeyError: 'planted'", ""), verdict))
    record = tally.record("tools/fuzz.py", 1.0)
    expected = {"cases": 5, "accepted": 1, "refused": 1, "bad": 3, "traceback": 2, "signal": 1, "seconds": 2.5}
    assert record["counts"] == dict.fromkeys(("config", "qarl check", "all"), expected)
    assert len(record["bad"]) == 3 and "signal" in tally.table()
    assert "--seed 9 --only config-0" in record["bad"][-1] and "KeyError: 'planted'" in record["bad"][-1]


def test_a_sealed_checkpoint_has_digests_that_fit(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "manifest.json").write_text('{"files": {"state.json": {}}}')
    seal(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    own = manifest.pop("sha256")
    assert own == hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    assert manifest["files"]["state.json"] == {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
