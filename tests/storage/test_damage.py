"""Every file of a run, damaged in every way: a reader returns a result or an error of one line, and never hangs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing.damage import damage_entry, damage_file, seal
from fuzzing.series import with_draws
from fuzzing.values import chance
from hand_made_runs import add_diagnostics, diagnostics, make_run, step
from hypothesis.strategies import DrawFn
from whole_pieces import whole_pieces

from qarl.batch.saved import pick_step, read_rollouts
from qarl.comparison.members import numbers_of
from qarl.comparison.progress import last_record
from qarl.config import Config
from qarl.errors import UserError
from qarl.evaluation.records import keep_rows
from qarl.report.run_report import report_sections
from qarl.storage.checkpoint import CheckpointStore
from qarl.storage.environment import environment_changes
from qarl.storage.history import History, began_after, write_history
from qarl.storage.rundir import RunDirectory
from qarl.storage.runs import Evaluation, find_runs, read_run, read_run_config
from qarl.storage.saved_state import SavedState, saved_state
from qarl.storage.tensorfile import safetensors_chunks, write_file

STEPS = 4
NOW = {"packages": {"torch": "2.0"}, **dict.fromkeys(("python", "cpu", "gpus", "cuda", "threads", "git_revision"))}
SHA = "ab" * 32


def state(step: int) -> dict[str, Any]:
    return {
        "version": step,
        "data": {"epoch": 0, "position": 4 * step, "fingerprint": SHA, "columns_fingerprint": SHA},
        "optimizer": {"optimizer": "adamw", "tensors": []},
        "skipped_in_a_row": 0,
        "snapshot_sha256": SHA,
        "inputs": {"model": {"weights": SHA}, "reward": {"exact": SHA}},
    }


def make(path: Path) -> Path:
    """Write a finished run with every kind of file that some command reads."""
    make_run(path, [step(i) for i in range(1, STEPS + 1)], STEPS)
    add_diagnostics(path, diagnostics(1))
    interval = {"mean": 0.5, "low": 0.25, "high": 0.75}
    scores = {"avg": interval, "pass": {"1": interval, "4": interval}}
    evaluations = [{"step": i, "tasks": [{"name": "t", **scores}], "overall": scores} for i in (2, 4)]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    integers = {"prompt_lengths": [2, 2], "response_lengths": [1, 2], "groups": [0, 0]}
    integers |= {"prompt_tokens": [1] * 4, "response_tokens": [2] * 3}
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in integers.items()}
    tensors |= {name: torch.zeros(3) for name in ("logp_sampler", "logp_old", "logp")}
    tensors |= {name: torch.zeros(2) for name in ("advantages", "rewards")} | {"version": torch.tensor([1])}
    write_file(path / "rollouts" / "000001.safetensors", safetensors_chunks(tensors))
    (path / "checkpoints").mkdir()
    store = CheckpointStore(path / "checkpoints", 0)
    for number in (1, 4):
        store.save(number, whole_pieces({"masters": {"w": torch.ones(4, 4)}, "optimizer": {}}), state(number))
    write_history(path, History(checkpoint=STEPS))
    return path


def begin(run: Path) -> None:
    values = read_run_config(run).model_dump()
    values["train"]["run_dir"] = str(run)
    RunDirectory.open(Config.model_validate(values), "auto").close()


def resume(run: Path) -> None:
    found = CheckpointStore(run / "checkpoints", 2).latest_valid(lambda line: None)
    if found is not None:
        saved_state(SavedState, found.state, str(found.path))
        began_after(run, found.step, own=True, every=2)
    else:
        began_after(run, 0, own=False, every=2)


READERS: dict[str, Callable[[Path], Any]] = {
    "runs": lambda run: find_runs(run.parent),
    "report": lambda run: report_sections(read_run(run)),
    "compare": lambda run: json.dumps(numbers_of(read_run(run)), allow_nan=False),
    "progress": lambda run: last_record(run / "metrics.jsonl"),
    "environment": lambda run: environment_changes(run / "environment.json", NOW),
    "diagnose": lambda run: read_rollouts(run, pick_step(run, None)),
    "evaluate": lambda run: keep_rows(run / "evaluations.jsonl", Evaluation, lambda row: row["step"] <= 2, "here"),
    "start": begin,
    "resume": resume,
}
# File or folder -> the readers that read it.
FILES = {
    "config.yaml": "runs start",
    "environment.json": "runs report environment start",
    "metrics.jsonl": "report compare progress resume start",
    "evaluations.jsonl": "report compare evaluate",
    "history.json": "resume",
    "rollouts": "report diagnose resume",
    "rollouts/000001.jsonl": "report",
    "rollouts/000001.safetensors": "diagnose",
    "diagnostics/000001.json": "report",
    "checkpoints": "resume diagnose start",
    "checkpoints/latest": "resume",
    "checkpoints/000004": "resume diagnose",
    "checkpoints/000004/manifest.json": "resume diagnose",
    "checkpoints/000004/state.json": "resume",
    "checkpoints/000004/masters.safetensors": "resume",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("whole") / "run")


def test_the_whole_run_is_read_by_every_reader(whole):
    for reader in READERS.values():
        reader(whole)


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_omitted_or_refused_in_one_line(whole, file, tmp_path):
    run = tmp_path / "run"
    is_folder = (whole / file).is_dir()

    def check(draw: DrawFn) -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run, symlinks=True)
        what = (damage_entry if is_folder or chance(draw, 20) else damage_file)(draw, run / file)
        if file.startswith("checkpoints/000004/"):
            seal(run / "checkpoints/000004", files=not file.endswith("manifest.json") or chance(draw, 50))
        for name in FILES[file].split():
            try:
                READERS[name](run)
            except UserError as error:
                assert "\n" not in str(error) or file == "config.yaml", (what, name)  # there a line a key
            except Exception as error:
                raise AssertionError(f"{what}: {name}") from error

    for number in range(4):
        with_draws("1", f"{file}-{number}", check)


NAMES = ["٠٠٠٠٠٤", "0000000004", "-00004", "1e9"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_only_resembles_a_step_is_ignored(whole, name, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True)
    shutil.copytree(run / "checkpoints" / "000004", run / "checkpoints" / name)
    for folder, suffix in (("rollouts", ".jsonl"), ("rollouts", ".safetensors"), ("diagnostics", ".json")):
        (run / folder / f"{name}{suffix}").write_text("{}")
    assert CheckpointStore(run / "checkpoints", 0).steps() == [1, 4] and pick_step(run, None) == 1
    for reader in READERS.values():
        reader(run)


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True)
    (run / "checkpoints" / "000004").rename(run / "checkpoints" / "000007")
    skipped: list[str] = []
    assert CheckpointStore(run / "checkpoints", 0).latest_valid(skipped.append).step == 1
    assert "is of step 4, but its directory is named after another one" in skipped[0]
