"""A run directory, or a part of it, disappears or is replaced during a run: an error of one line, and no hang."""

import shutil

import pytest
from tiny_runs import settings, write_config

pytestmark = pytest.mark.slow

AT_THE_SECOND_ROLLOUT = """
import os, shutil
from qarl.rollout.native.engine import NativeEngine
real, calls = NativeEngine.generate, []
def generate(self, *arguments):
    calls.append(1)
    if len(calls) == 2:
        WHAT
    return real(self, *arguments)
NativeEngine.generate = generate
"""


@pytest.fixture
def config(tiny_model, tmp_path):
    data = settings(tiny_model("llama"), train={"steps": 2, "run_dir": "run"}, checkpoint={"every": 1})
    return write_config(tmp_path / "c.yaml", data)


@pytest.mark.parametrize(
    ("what", "end"),
    [
        ("shutil.rmtree('run')", "run/rollouts/000002.jsonl: cannot be written: No such file"),
        ("os.unlink('run/metrics.jsonl'); os.mkfifo('run/metrics.jsonl')", "run/metrics.jsonl: is a pipe, not a file"),
    ],
)
def test_what_disappears_under_a_run_is_one_line(qarl, config, tmp_path, what, end):
    done = qarl.run("train", config, before=AT_THE_SECOND_ROLLOUT.replace("WHAT", what), cwd=tmp_path)
    assert done.code == 2 and done.err.startswith(f"error: {end}") and done.err.count("\n") == 1, done.err


def test_a_run_whose_checkpoints_are_gone_is_left_as_it_is(qarl, config, tmp_path):
    assert qarl.run("train", config, cwd=tmp_path).code == 0
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints")
    before = {p: p.read_bytes() for p in (run / "metrics.jsonl", *(run / "rollouts").iterdir())}
    done = qarl.run("train", config, "train.steps=3", cwd=tmp_path)
    assert done.code == 2 and done.err == (
        "error: run/checkpoints: the checkpoints of this run are gone (there was one of step 2); put them back to "
        "resume, or choose another train.run_dir to start over\n"
    )
    assert "quantize" not in done.out  # nothing was loaded for it
    assert before == {p: p.read_bytes() for p in (run / "metrics.jsonl", *(run / "rollouts").iterdir())}
