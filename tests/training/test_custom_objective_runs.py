"""Runs with a custom objective: the example trains, resumes with the same source, and an error is one line."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import yaml
from run_faults import recorded
from tiny_runs import ONE_PICTURE, ROOT, Finished, Qarl, settings, write_config

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "custom_objective.py"
CUSTOM = {"name": "custom", "path": "own.py:cispo", "kwargs": {"clip_ratio_high": 0.01}, "aggregation": "token-mean"}


class Place:
    """A folder with a configuration, and a copy of the example named own.py."""

    def __init__(self, qarl: Qarl, model: Path, folder: Path) -> None:
        self.qarl, self.folder = qarl, folder
        shutil.copy(EXAMPLE, folder / "own.py")
        train = {"steps": 2, "run_dir": "run"}
        data = settings(model, train=train, optim={"lr": 1e-2}, logging={"tensorboard": False}, checkpoint={"every": 1})
        write_config(folder / "c.yaml", {**data, "objective": CUSTOM})

    def train(self, *overrides: str) -> Finished:
        return self.qarl.run("train", "c.yaml", *overrides, cwd=self.folder)

    def edit(self, old: str, new: str) -> None:
        text = (self.folder / "own.py").read_text()
        assert old in text
        (self.folder / "own.py").write_text(text.replace(old, new))


@pytest.fixture
def place(qarl, tiny_model, tmp_path) -> Place:
    return Place(qarl, tiny_model("llama"), tmp_path)


def test_the_example_trains_reports_and_is_diagnosed(place, qarl):
    done = place.train("train.steps=2", "diagnostics={shadow_every: 1, gradients_every: 2}")
    assert done.code == 0, done.err
    metrics = recorded(place.folder / "run")
    assert len(metrics) == 2 and all(math.isfinite(row["policy/loss"]) for row in metrics)
    # Two optimizer steps a training step: in the second the weights have moved, and some ratios are above 1.01.
    assert all(0 < row["objective/weight_mean"] < 1 + 1e-2 and row["policy/clip_frac"] > 0 for row in metrics)
    assert metrics[1]["policy/grad_norm"] > 0
    stored = yaml.safe_load((place.folder / "run" / "config.yaml").read_text())
    assert stored["objective"]["path"] == "own.py:cispo" and stored["objective"]["ratio"] == "train"
    for command in (["report", "run"], ["diagnose", "run", "--no-gradients"], ["runs", "."]):
        done = qarl.run(*command, cwd=place.folder, before=ONE_PICTURE)
        assert done.code == 0, done.err


def test_a_run_goes_on_with_the_source_it_had_and_not_with_another(place):
    assert place.train("train.steps=1").code == 0
    environment = json.loads((place.folder / "run" / "environment.json").read_text())
    assert environment["inputs"]["objective"].keys() == {"cispo"}
    place.edit("inputs.token_advantages", "2 * inputs.token_advantages")
    refused = place.train()
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert re.search(
        r"objective\.path: the source of `cispo` changed since it was saved; .*allow_changed: \[obj", refused.err
    )
    done = place.train("checkpoint.allow_changed=[objective]")
    assert done.code == 0 and "the source of `cispo` changed since the checkpoint of step 1" in done.out, done.err
    other = place.train("objective.kwargs={clip_ratio_high: 0.5}", "train.steps=3")
    assert other.code == 2 and "objective.kwargs.clip_ratio_high is 0.01 there, 0.5 here" in other.err


def test_a_fault_in_a_step_is_one_line_and_what_is_finished_stays(place):
    place.edit(
        "    counted = ", "    CALLS.append(1)\n    if len(CALLS) > 2:\n        raise ValueError('odd')\n    counted = "
    )
    # Called once per optimizer step, twice per training step.
    place.edit("\n\n\ndef cispo", "\n\nCALLS = []\n\n\ndef cispo")
    done = place.train()
    assert done.code == 2
    assert re.fullmatch(r"error: objective\.path: `own\.py:cispo`: raised ValueError: odd \(own\.py:\d+\)\n", done.err)
    assert len(recorded(place.folder / "run")) == 1 and (place.folder / "run" / "checkpoints" / "000001").is_dir()
    place.edit("raise ValueError('odd')", "weight = weight * float('nan')")
    place.edit(
        "    value = weight", "    if len(CALLS) > 1:\n        weight = weight * float('nan')\n    value = weight"
    )
    done = place.train("train.run_dir=other")
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert "objective.path: `own.py:cispo`: its value is nan at a token of advantage" in done.err
