"""Reading run directories in every state they are found in."""

import fcntl
import json
from pathlib import Path

import pytest
import yaml
from plain_settings import plain_settings

from qarl.errors import UserError
from qarl.storage.runs import find_runs, read_run


def make(path: Path, done: int = 2) -> Path:
    """Write a run of `done` steps out of 4."""
    path.mkdir(parents=True)
    settings = plain_settings(train={"run_dir": str(path)})
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    (path / "environment.json").write_text('{"host": "here"}')
    (path / ".lock").touch()
    lines = [json.dumps({"step": step, "reward/mean": step / 10}) + "\n" for step in range(1, done + 1)]
    (path / "metrics.jsonl").write_text("".join(lines))
    return path


@pytest.mark.parametrize("done, state", [(0, "empty"), (2, "stopped"), (4, "finished")])
def test_the_state_of_a_run_whose_lock_is_free(tmp_path, done, state):
    record = read_run(make(tmp_path / "a", done))
    assert (record.state, record.step, len(record.metrics)) == (state, done, done)
    assert record.environment == {"host": "here"} and record.config.train.steps == 4


def test_a_run_whose_lock_is_held_is_running_and_reading_it_leaves_the_lock_free(tmp_path):
    path = make(tmp_path / "a", 4)
    with open(path / ".lock", "a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert read_run(path).state == "running"
        fcntl.flock(holder, fcntl.LOCK_UN)
        assert read_run(path).state == "finished"
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_damaged_lines_and_files_are_omitted_and_lines_counted(tmp_path):
    path = make(tmp_path / "a", 1)
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(b'\x00\xff\n{"x": 1}\n[1]\n{"step": 2, "reward/mean": null}\n{"step": 3, "rew')
    (path / "environment.json").write_text("{")
    (path / "evaluations.jsonl").write_text('{"step": 0, "overall": {}}\n{"step": 2, "overall": {}}\n')
    record = read_run(path)
    assert [row["step"] for row in record.metrics] == [1, 2] and record.damaged == {"metrics.jsonl": 4}
    assert record.environment == {} and [row["step"] for row in record.evaluations] == [0, 2]
    (path / "metrics.jsonl").unlink()
    assert read_run(path).metrics == []


@pytest.mark.parametrize(
    "kind, message", [("missing", "no such directory"), ("file", "is a file"), ("empty", "no config")]
)
def test_a_path_that_is_no_run_is_one_line(tmp_path, kind, message):
    path = tmp_path / "a"
    if kind == "file":
        path.touch()
    elif kind == "empty":
        path.mkdir()
    with pytest.raises(UserError, match=f"{path}: .*{message}") as caught:
        read_run(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[", "model: {}"])
def test_a_damaged_configuration_is_a_user_error(tmp_path, text):
    path = make(tmp_path / "a")
    (path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml"):
        read_run(path)


def test_runs_are_found_at_any_depth_and_broken_ones_are_named(tmp_path):
    make(tmp_path / "b" / "deep")
    make(tmp_path / "a")
    make(tmp_path / ".hidden" / "x")
    (make(tmp_path / "broken") / "config.yaml").write_text("train: 3")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("not a run")
    records, problems = find_runs(tmp_path)
    assert [str(record.path.relative_to(tmp_path)) for record in records] == ["a", "b/deep"]
    assert len(problems) == 1 and str(tmp_path / "broken") in problems[0]
