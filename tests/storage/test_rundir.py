"""The run directory: when it is reused, refusals that write nothing, locking, atomic files."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import yaml
from full_disk import fill_disk
from plain_settings import plain_config

from qarl.config import Config
from qarl.errors import UserError
from qarl.storage.config_difference import config_difference
from qarl.storage.disk import atomic_write_text
from qarl.storage.rundir import RunDirectory, begun_configuration


@pytest.fixture
def make(tmp_path):
    def make(**sections) -> Config:
        train = {"run_dir": str(tmp_path / "runs" / "demo"), **sections.pop("train", {})}
        return plain_config(train=train, **sections)

    return make


def run_once(config: Config, resume: str = "auto") -> None:
    """Write what a run of at least one step writes."""
    with RunDirectory.open(config, resume) as run:
        run.begin()
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n')


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_a_new_directory_holds_config_and_environment_or_is_removed_if_nothing_began(make, tmp_path):
    with RunDirectory.open(make(), "auto") as run:
        (run.path / "rewards.log").write_text("")
        (run.path / "checkpoints").mkdir()
    assert list(tmp_path.iterdir()) == []
    config = make(optim={"lr": 1e-6})
    with RunDirectory.open(config, "auto") as run:
        assert run.begin() == []
        assert (run.path / "config.yaml").read_text() == config.to_yaml()
        environment = json.loads((run.path / "environment.json").read_text())
        assert environment["packages"]["torch"] and environment["seed"] == 0 and environment["threads"] >= 1
    assert {p.name for p in run.path.iterdir()} == {".lock", "config.yaml", "environment.json"}


def test_logs_of_a_refused_start_stay_of_every_rank(make):
    with RunDirectory.open(make(), "auto") as run:
        for folder in ("rank-001/sampler", "rank-002"):
            (run.path / folder).mkdir(parents=True)
        (run.path / "rank-001" / "sampler.log").write_text("no such model")
        for empty in ("rank-001/rewards.log", "rank-002/rewards.log"):
            (run.path / empty).write_text("")
    assert [str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file() and p.name != ".lock"] == [
        "rank-001/sampler.log"
    ]
    assert not (run.path / "rank-002").exists() and not (run.path / "rank-001" / "sampler").exists()


def test_nothing_is_written_before_the_run_begins(make):
    make().run_dir.mkdir(parents=True)
    RunDirectory.open(make(), "auto").close()
    assert make().run_dir.is_dir()  # an existing directory stays
    run_once(make())
    before = snapshot(make().run_dir)
    RunDirectory.open(make(train={"steps": 99}), "auto").close()
    after = snapshot(make().run_dir)
    assert before.pop(".lock") and after.pop(".lock") and before == after


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {
            "train": {"steps": 99},
            "checkpoint": {"every": 3, "keep_last": 9},
            "logging": {"console": "none", "wandb": {"project": "p"}},
        },
    ],
)
def test_a_run_is_resumed_with_keys_that_change_no_step_which_are_stored(make, sections, tmp_path):
    run_once(make())
    for resume in ("auto", "some/checkpoint"):
        config = make(**sections)
        with RunDirectory.open(config, resume) as run:
            run.begin()
            assert (run.path / "config.yaml").read_text() == config.to_yaml()
    (tmp_path / "runs" / "demo").rename(tmp_path / "runs" / "moved")
    run_once(make(train={"run_dir": str(tmp_path / "runs" / "moved")}))


def test_keys_that_an_older_run_lacks_have_their_defaults(make):
    older = make(objective={"name": "grpo"})
    run_once(older)
    stored = yaml.safe_load((older.run_dir / "config.yaml").read_text())
    del stored["diagnostics"], stored["objective"]["loss"], stored["objective"]["ratio"]
    del stored["correction"]["preset"], stored["correction"]["reject"], stored["model"]["learner_dtype"]
    (older.run_dir / "config.yaml").write_text(yaml.safe_dump(stored))
    with pytest.raises(UserError, match=r'objective\.loss is "clip" there, "no_clip" here'):
        RunDirectory.open(make(objective={"name": "grpo", "loss": "no_clip"}), "auto")
    run_once(older)


def test_a_stored_configuration_that_is_no_longer_valid_is_compared_as_it_is(make):
    run_once(make())
    with (make().run_dir / "config.yaml").open("a") as file:
        file.write("gone: 1\n")
    with pytest.raises(UserError, match=r"another configuration \(gone is 1 there, not set here\)"):
        RunDirectory.open(make(), "auto")


def test_another_configuration_is_refused_with_the_first_three_differences_and_nothing_is_written(make):
    first = make()
    run_once(first)
    before = snapshot(first.run_dir)
    with pytest.raises(UserError) as caught:
        RunDirectory.open(make(optim={"lr": 3e-5}, train={"seed": 7}), "auto")
    message = str(caught.value)
    assert "optim.lr is 1e-06 there, 3e-05 here" in message and "train.seed is 0 there, 7 here" in message
    assert "choose another train.run_dir" in message and "\n" not in message
    assert snapshot(first.run_dir) == before
    with pytest.raises(UserError, match=r"optim\.lr .*optim\.eps .*train\.seed .* and 1 more\)"):
        RunDirectory.open(make(optim={"lr": 1e-3, "eps": 1e-6}, train={"seed": 7, "threads": 1}), "auto")


def test_a_run_has_begun_once_it_has_results(make):
    config, other = make(), make(optim={"lr": 3e-5})
    assert begun_configuration(config.run_dir) is None
    for given in (config, other):  # a run stopped before its first step does not fix the configuration
        with RunDirectory.open(given, "auto") as run:
            run.begin()
            assert (run.path / "config.yaml").read_text() == given.to_yaml()
        assert begun_configuration(config.run_dir) is None
    run_once(config)
    assert begun_configuration(config.run_dir) == config
    (config.run_dir / "config.yaml").write_text("[")
    assert begun_configuration(config.run_dir) is None


SIZES = {"rollout": {"max_num_seqs": 64}, "train": {"logprob_chunk": 128}}


@pytest.mark.parametrize(
    ("theirs", "ours", "lines"),
    [
        # a size left to the device is the stored one
        (
            SIZES,
            {"rollout": {"max_num_seqs": None}, "train": {"logprob_chunk": 64}},
            ["train.logprob_chunk is 128 there, 64 here"],
        ),
        # keys on one side only, empty tables
        (
            {"a": {"x": 1}, "b": {}},
            {"b": {"y": None}},
            ["b.y is not set there, null here", "a.x is 1 there, not set here", "b is {} there, not set here"],
        ),
        # a difference inside a list
        (
            {"reward": {"functions": [{"name": "math"}, {"name": "brevity"}]}, "rollout": {"stop": []}},
            {"reward": {"functions": [{"name": "math"}, {"name": "exact"}]}, "rollout": {"stop": ["x"]}},
            ['reward.functions.1.name is "brevity" there, "exact" here', 'rollout.stop is [] there, ["x"] here'],
        ),
    ],
)
def test_differences_of_two_configurations_are_named_by_their_keys(theirs, ours, lines):
    assert config_difference(theirs, ours) == lines


def test_resume_never_refuses_a_directory_with_results(make):
    config = make()
    for _ in range(2):  # accepted while there are no results
        with RunDirectory.open(config, "never") as run:
            run.begin()
    (config.run_dir / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"checkpoint\.resume is never; choose another train\.run_dir"):
        RunDirectory.open(config, "never")


def test_files_of_a_killed_start_are_replaced_and_foreign_ones_refused(make):
    config = make()
    (config.run_dir / "checkpoints").mkdir(parents=True)
    for name in (".lock", ".config.yaml.tmp", "environment.json", "rewards.log", "metrics.jsonl"):
        (config.run_dir / name).write_text("" if name == "metrics.jsonl" else "{")
    run_once(config)
    (config.run_dir / "config.yaml").write_bytes(b"\xff\xfe: [")
    with pytest.raises(UserError, match=r"config\.yaml"):
        RunDirectory.open(config, "auto")
    (foreign := make(train={"run_dir": f"{config.run_dir}-thesis"}).run_dir).mkdir()
    (foreign / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"not a run directory \(it holds 'thesis.tex'"):
        RunDirectory.open(make(train={"run_dir": str(foreign)}), "auto")
    assert snapshot(foreign) == {"thesis.tex": b"precious"}


def test_a_full_disk_leaves_no_new_directory(make, monkeypatch):
    config = make()
    fill_disk(monkeypatch)
    refused = pytest.raises(UserError, match=r"No space left on device \([\d,]+ free\); free some space")
    with refused, RunDirectory.open(config, "auto") as run:
        run.begin()
    assert not config.run_dir.exists()


def test_a_directory_in_use_is_refused_naming_the_process_and_a_forked_worker_does_not_keep_the_lock(make):
    run = RunDirectory.open(make(), "auto")
    with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on .*; wait for it"):
        RunDirectory.open(make(), "auto")
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    worker = context.Process(target=stop.wait, args=(30,))
    worker.start()
    try:
        run.close()
        RunDirectory.open(make(), "auto").close()
    finally:
        stop.set()
        worker.join()


def test_environment_changes_are_reported(make):
    config = make()
    run_once(config)
    path = config.run_dir / "environment.json"
    stored = json.loads(path.read_text())
    stored["packages"]["torch"] = "1.0"
    path.write_text(json.dumps(stored))
    with RunDirectory.open(config, "auto") as run:
        changes = run.begin()
    assert len(changes) == 1 and changes[0].startswith("torch was 1.0, is 2.")


def test_a_failed_atomic_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "config.yaml"
    atomic_write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(path, "new " * 10_000 + "\ud800")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
