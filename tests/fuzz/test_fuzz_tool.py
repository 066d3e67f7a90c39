"""`tools/fuzz.py` itself: planted faults are found and named, cases repeat, and the summary counts them."""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fuzzing.case as fuzzing_case
import pytest
from fuzzing.base import RUN, write_inputs
from fuzzing.case import Case, Outcome, execute
from fuzzing.configs import schema_keys, valid_config
from fuzzing.damage import seal, write_tensors
from fuzzing.options import WORKING, options
from fuzzing.series import KINDS, build, names, with_draws
from fuzzing.values import argument, paths, texts
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


def exhaust_memory() -> None:
    held = bytearray(200_000_000)
    held[::4096] = b"x" * len(held[::4096])
    raise SystemExit(0)


# Command, and its verdict: status and fault.
PLANTED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "accepted": (lambda: None, "accepted", ""),
    "refused in a line": (lambda: refuse("error: c.yaml: no such file; give another"), "refused", ""),
    "refused in two": (lambda: refuse("error: a: b", "error: c: d"), "refused", ""),
    "an option's own refusal": (
        lambda: refuse("Usage: qarl check", "╭─ Error ───╮", "│ No such option │"),
        "refused",
        "",
    ),
    "traceback": (raise_a_fault, "bad", "traceback"),
    "printed traceback": (
        lambda: print_and_end("Traceback (most recent call last):\n  x\nKeyError: 5"),
        "bad",
        "traceback",
    ),
    "hang": (lambda: time.sleep(1000), "bad", "hang"),
    "hang that ignores signals": (ignore_signals, "bad", "hang"),
    "signal": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "bad", "signal"),
    "memory": (exhaust_memory, "bad", "memory"),
    "exit code 1": (lambda: print_and_end("", 1), "bad", "exit code"),
    "a fault that qarl reports": (lambda: refuse("error: report this", code=70), "bad", "exit code"),
    "escape": (lambda: print_and_end("\x1b[31mred"), "bad", "output"),
    "bidirectional override": (lambda: refuse("error: abc\u202edef"), "bad", "output"),
    "bytes": (lambda: (os.write(1, b"\xff\xfe abc\n"), sys.exit(0)), "bad", "output"),
    "a surrogate that cannot be printed": (lambda: print_and_end("\ud800"), "bad", "traceback"),
    "refused without a reason": (lambda: refuse(), "bad", "output"),
    "refused in prose": (lambda: refuse("error: a: b", "and more of it"), "bad", "output"),
    "an empty error": (lambda: refuse("error: "), "bad", "output"),
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
    monkeypatch.setattr(fuzzing_case, "READING_S", 2.0)
    monkeypatch.setattr(fuzzing_case, "GIB", 2**27)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, short_limit: None) -> None:
    command, status, fault = PLANTED[name]
    _, verdict = run(tmp_path, command)
    assert (verdict.status, verdict.fault) == (status, fault), verdict


def test_a_case_that_is_kept_from_the_cores_is_waited_for(
    tmp_path: Path, short_limit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzing_case, "_starved", lambda pid, limit_s: True)
    _, verdict = run(tmp_path, lambda: time.sleep(2.5))
    assert verdict.status == "accepted"


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
    """A directory in the shape of a base, without a model that runs: what the mutators read of it."""
    import torch

    root = tmp_path_factory.mktemp("base")
    run = root / RUN
    write_inputs(root)
    tensors = {
        f"model.layers.{i}.mlp.{name}.weight": torch.zeros(4, 2) for i in (0, 1) for name in ("up_proj", "down_proj")
    }
    tensors["model.norm.weight"] = torch.zeros(2)
    for folder in (root / "model", root / "export"):
        folder.mkdir()
        write_tensors(folder / "model.safetensors", tensors)
        quantization = {"quant_method": "compressed-tensors"}
        (folder / "config.json").write_text(json.dumps({"hidden_size": 64, "quantization_config": quantization}))
        for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_text('{"eos_token_id": 1, "model": {"vocab": {"a": 1, "b": 2}}}')
    (root / "results").mkdir()
    for name in ("completions.jsonl", "evaluation.json", "results.json"):
        (root / "results" / name).write_text('{"task": "a", "prompt_id": 3, "reward": 0.5}')
    for folder in ("checkpoints", "rollouts", "diagnostics", "evaluations"):
        (run / folder).mkdir(parents=True)
    shutil.copy(root / "tiny.yaml", run / "config.yaml")
    row = {"reward/mean": 0.5, "tasks": [{"name": "a", "avg": {"mean": 1.0}}]}
    lines = "".join(json.dumps({"step": i, **row}) + "\n" for i in (1, 2, 3))
    for name in ("metrics.jsonl", "evaluations.jsonl", "environment.json", "evaluations/000002.jsonl"):
        (run / name).write_text(lines)
    for step in ("000001", "000003"):
        for name in (f"diagnostics/{step}.json", f"rollouts/{step}.jsonl"):
            (run / name).write_text('{"step": 3, "tokens": [1, 2], "a": {"b": null}}')
        write_tensors(run / "rollouts" / f"{step}.safetensors", tensors)
        folder = run / "checkpoints" / step
        folder.mkdir()
        for name in ("masters.safetensors", "optimizer.safetensors"):
            write_tensors(folder / name, tensors)
        (folder / "state.json").write_text('{"version": 1, "data": {"position": 4}}')
        files = {path.name: {"bytes": 1, "sha256": "0"} for path in sorted(folder.iterdir())}
        manifest = {"format_version": 1, "step": 3, "groups": {"masters": ["masters.safetensors"]}, "files": files}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    (run / "checkpoints" / "latest").symlink_to("000003")
    return root


def contents(directory: Path) -> dict[str, object]:
    """Every entry below it: bytes of files, targets of links, kinds of others."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        content = path.read_bytes if path.is_file() else lambda: path.lstat().st_mode  # noqa: B023 - called at once
        found[str(path.relative_to(directory))] = os.readlink(path) if path.is_symlink() else content()
    return found


@pytest.mark.parametrize("kind", ["config", "override", "option", "data", "run", "model"])
def test_a_case_is_the_same_whenever_it_is_built(kind: str, base: Any, tmp_path: Path) -> None:
    different = set()
    for number in range(12):
        made = []
        for order in (1, 2):
            random.seed(order)  # which no mutator may use
            case = build("7", f"{kind}-{number}", base, tmp_path / "case")
            made.append((case.mutation, case.argv, case.must_refuse, contents(case.directory)))
            case.remove()
        assert made[0] == made[1]
        different.add(case.mutation)
    assert len(different) > 8, "the cases of a series are all alike"


def test_cases_do_not_depend_on_kinds_and_count_and_reach_every_key_and_option() -> None:
    every = list(names("3", 400, KINDS))
    assert len(set(every)) == 400 and {name.rpartition("-")[0] for name in every} == set(KINDS)
    assert every[:50] == list(names("3", 50, KINDS))
    runs = [name for name in every if name.startswith("run-")]
    assert list(names("3", len(runs), ["run"])) == runs
    assert every != list(names("4", 400, KINDS))
    keys = {".".join(map(str, path)) for path in schema_keys()}
    assert {"train.steps", "reward.functions.0.weight", "rollout.vllm.memory_frac"} <= keys
    assert {"correction.reject.0.upper", "evaluation.tasks.0.data.source"} <= keys
    assert set(options()) == set(WORKING)
    assert {option.name for option, _ in options()["generate"]} >= {"prompt", "prompt_file", "seed", "as_json"}


def test_the_summary_counts_what_was_found(tmp_path: Path, short_limit: None) -> None:
    tally = Tally("9")
    for number, name in enumerate(("accepted", "refused in a line", "traceback", "traceback", "hang")):
        case, verdict = run(tmp_path / str(number), PLANTED[name][0])
        tally.add(Result(case, Outcome(0, False, 0.5, 0, b"", b"KeyError: 'planted'", ""), verdict))
    record = tally.record("tools/fuzz.py", 1.0)
    expected = {"cases": 5, "accepted": 1, "refused": 1, "bad": 3, "traceback": 2, "hang": 1, "seconds": 2.5}
    assert record["total"] == record["kinds"]["config"] == record["commands"]["check"] == expected
    assert len(record["bad"]) == 3 and "hang" in tally.table()
    assert "--seed 9 --only config-0" in record["bad"][-1] and "KeyError: 'planted'" in record["bad"][-1]


def test_a_sealed_checkpoint_has_digests_that_fit(base: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(base / RUN / "checkpoints/000003", tmp_path / "000003")
    (folder / "state.json").write_text("{}")
    seal(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        raw = (folder / name).read_bytes()
        assert entry == {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    own = manifest.pop("sha256")
    seal(folder)
    assert json.loads((folder / "manifest.json").read_text())["sha256"] == own
    assert own == hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def test_mutators_leave_the_base_alone(base: Any, tmp_path: Path) -> None:
    before = contents(base)
    for name in names("11", 60, ["run", "model", "data", "option"]):
        build("11", name, base, tmp_path / "case").remove()
    assert contents(base) == before


def test_arguments_can_be_passed_by_a_shell_and_valid_configurations_keep_their_ranges() -> None:
    found: list[str] = []
    for number in range(300):
        with_draws("1", str(number), lambda draw: found.append(draw(texts | paths)))
    for text in found:
        raw = os.fsencode(argument(text))
        assert b"\0" not in raw and len(raw) < 131_072
    assert argument("a\ud800b") == os.fsdecode(b"a\xed\xa0\x80b")
    drawn: list[tuple[str, dict[str, Any]]] = []
    for number in range(200):
        with_draws("1", f"valid-{number}", lambda draw: drawn.append(valid_config(draw)))
    assert len({what for what, _ in drawn}) > 150
    assert all(data["train"]["steps"] == 2 for _, data in drawn)


def test_a_sequence_of_arguments_reaches_the_command(tmp_path: Path) -> None:
    def command(argv: Sequence[str]) -> None:
        print(*argv, os.environ["HOME"], os.getcwd(), sep="\n")

    case = Case("config-1", tmp_path, argv=["runs", "--json"])
    case.cwd.mkdir(parents=True)
    out = execute(case, command).out.decode().splitlines()
    assert out == ["runs", "--json", str(tmp_path / "home"), str(case.cwd)]
