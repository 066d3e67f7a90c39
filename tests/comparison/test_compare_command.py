"""Whole runs of `qarl compare`: members are trained once, may fail, and continue after an interruption."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from tiny_runs import ONE_PICTURE, settings, write_config

from qarl.checks.check import check_model
from qarl.memory.tensors import saved_bytes
from qarl.storage.runs import read_run

pytestmark = pytest.mark.slow

# Polls often, and draws one picture.
QUICK = "from qarl.comparison import start_members; start_members.POLL_SECONDS = 0.02" + ONE_PICTURE

# Raises after the first step of w4a16-aligned, as long as there is a file `fail`.
JUDGE = """
import os
def judge(completions, prompts, **columns):
    files = os.scandir(f"/proc/{os.getppid()}/fd")  # of the run, which holds its lock; above it, the comparison's
    run = max((os.path.dirname(path) for path in map(os.readlink, files) if path.endswith("/.lock")), key=len)
    if os.path.exists("fail") and "w4a16-aligned" in run and os.path.getsize(run + "/metrics.jsonl"):
        raise RuntimeError("<b>out of order</b>")
    return [float(len(c)) for c in completions]
"""

# In the third step it waits, once, until the run has been told to stop.
HOLDING = """
import os, time
calls = []
def judge(completions, prompts, **columns):
    calls.append(1)
    if len(calls) == 3 and not os.path.exists("third"):
        open("third", "w").close()
        while "SIGINT: stopping" not in open("out/logs/w4a16-aligned-seed0.log").read():
            time.sleep(0.02)
    return [float(len(c)) for c in completions]
"""


def compare(qarl, folder: Path, *argv: object):
    return qarl.run("compare", *argv, before=QUICK, cwd=folder)


def members(out: Path) -> dict[str, dict]:
    comparison = json.loads((out / "comparison.json").read_text())
    assert (comparison["format_version"], comparison["kind"]) == (1, "runs")
    return {member["name"]: member for member in comparison["members"]}


def configured(folder: Path, model: Path, **sections) -> Path:
    return write_config(folder / "tiny.yaml", settings(model, **({"train": {"steps": 2}} | sections)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("comparison")


@pytest.fixture(scope="module")
def compared(qarl, tiny_model, folder):
    """Two learners; the reward of the aligned one fails in its second step."""
    (folder / "judge.py").write_text(JUDGE)
    (folder / "fail").touch()
    config = configured(folder, tiny_model("llama"), reward={"functions": [{"name": "judge.py:judge"}]})
    argv = (config, "--learners", "aligned,full_precision")
    return argv, compare(qarl, folder, *argv)


def test_a_member_that_fails_is_a_row_with_its_reason_and_the_others_have_their_numbers(compared, folder):
    done = compared[1]
    assert done.code == 1, done.err
    found = members(folder / "runs/compare-tiny")
    failed = found.pop("w4a16-aligned-seed0")
    assert failed["state"] == "failed" and "out of order" in failed["reason"] and failed["steps"] == 1
    assert "w4a16-aligned-seed0: failed: " in done.out
    (fine,) = found.values()
    numbers = ["checkpoint_bytes", "memory_peak_gib", "step_s", "rollout_s", "learner_s", "publish_s"]
    assert all(fine[name] > 0 for name in numbers)
    assert (fine["scheme"], fine["learner"], fine["seed"], fine["objective"]) == ("w4a16", "full_precision", 0, "grpo")
    assert fine["state"] == "finished" and fine["mismatch_delta_abs_max"] > 0
    run = folder / "runs/compare-tiny/runs/w4a16-full_precision-seed0"
    config = read_run(run).config
    counted = saved_bytes(config, check_model(config.model).architecture)
    size = sum(path.stat().st_size for path in (run / "checkpoints/latest").resolve().rglob("*"))
    assert counted < size < counted + 32 * 1024  # headers, manifest, state.json


def test_a_rerun_trains_only_what_is_missing(compared, folder, qarl):
    argv = compared[0]
    out = folder / "runs/compare-tiny"
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.glob("runs/*/metrics.jsonl")}
    (folder / "fail").unlink()
    done = compare(qarl, folder, *argv)
    assert done.code == 0, done.err
    touched = {path for path, was in before.items() if (path.stat().st_mtime_ns, path.read_bytes()) != was}
    assert touched == {out / "runs/w4a16-aligned-seed0/metrics.jsonl"}
    found = members(out)
    assert {member["state"] for member in found.values()} == {"finished"}
    assert [member["reused"] for member in found.values()] == [False, True]


def test_another_comparison_takes_finished_runs_with_reuse(compared, folder, qarl):
    argv = (compared[0][0], "--learners", "full_precision", "--reuse", "runs", "--out", "again")
    assert compare(qarl, folder, *argv).code == 0
    (member,) = members(folder / "again").values()
    assert member["reused"] and member["run_dir"] == "runs/compare-tiny/runs/w4a16-full_precision-seed0"
    assert not (folder / "again/runs").exists()


def test_the_directory_of_another_configuration_is_refused_before_anything_starts(compared, folder, qarl):
    out = folder / "runs/compare-tiny"
    before = (out / "comparison.json").read_bytes()
    done = compare(qarl, folder, *compared[0], "optim.lr=0.5")
    assert done.code == 2 and "optim.lr is 0.001 there, 0.5 here" in done.err and done.err.count("\n") == 1
    assert (out / "comparison.json").read_bytes() == before


def test_finished_runs_are_compared_and_named_apart(compared, folder, qarl):
    runs = folder / "runs/compare-tiny/runs"
    done = compare(qarl, folder, runs / "w4a16-aligned-seed0", runs / "w4a16-full_precision-seed0")
    assert done.code == 0, done.err
    out = folder / "runs/compare-w4a16-aligned-seed0-w4a16-full_precision-seed0"
    comparison = json.loads((out / "comparison.json").read_text())
    assert list(members(out)) == ["w4a16-aligned-seed0", "w4a16-full_precision-seed0"]
    assert list(comparison["configuration_differences"]) == ["quant.learner"]
    assert "quant.learner" in (out / "comparison.html").read_text()


def test_a_study_trains_its_variants_side_by_side_and_shows_its_columns(qarl, tiny_model, tmp_path):
    study = {
        "title": "Two rates",
        "config": settings(tiny_model("llama"), train={"steps": 2}),
        "profiles": {"short": {"train": {"steps": 1}}},
        "variants": {"slow": {"optim": {"lr": 1e-6}}, "fast": {"optim": {"lr": 1e-2}}},
        "columns": [{"head": "learns", "metric": "optim/lr", "over": "max", "at_least": 1e-3}],
        "curves": [{"metric": "policy/grad_norm", "title": "Norms", "unit": "before clipping"}],
    }
    path = write_config(tmp_path / "study.yaml", study)
    done = compare(qarl, tmp_path, path, "--profile", "short", "--jobs", "2")
    assert done.code == 0, done.err
    starts = [line for line in done.out.splitlines() if line.endswith(" starts")]
    assert done.out.splitlines()[:2] == starts  # both before either ended
    found = members(tmp_path / "runs/compare-study")
    assert {name: (m["state"], m["steps"]) for name, m in found.items()} == dict.fromkeys(
        study["variants"], ("finished", 1)
    )
    assert (found["slow"]["column:learns"], found["fast"]["column:learns"]) == (1e-6, 1e-2)
    page = (tmp_path / "runs/compare-study/comparison.html").read_text()
    assert "Two rates" in page and "Norms" in page and (tmp_path / "runs/compare-study/plots/norms.png").exists()
    assert any("fast" in line and "yes" in line for line in done.out.splitlines())


def test_an_interrupted_comparison_goes_on(qarl, tiny_model, tmp_path):
    (tmp_path / "judge.py").write_text(HOLDING)
    reward = {"functions": [{"name": "judge.py:judge"}], "workers": 1, "timeout_s": 300}
    sections = {"train": {"steps": 4}, "checkpoint": {"every": 12}, "reward": reward}
    config = configured(tmp_path, tiny_model("llama"), **sections)
    argv = ("compare", config, "--seeds", "0,1", "--out", "out")
    started = qarl.start(*argv, before=QUICK, cwd=tmp_path)
    first = tmp_path / "out/runs/w4a16-aligned-seed0/metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (tmp_path / "third").exists():
        assert time.monotonic() < deadline, "no third step"
        time.sleep(0.02)
    os.kill(started.pid, signal.SIGINT)
    stopped = started.wait()
    assert stopped.code == 130, stopped.err
    assert [member["state"] for member in members(tmp_path / "out").values()] == ["stopped", "waiting"]
    kept = first.read_bytes()
    assert kept.count(b"\n") == 2
    done = qarl.run(*argv, "train.steps=5", before=QUICK, cwd=tmp_path)  # steps may grow: what was trained counts
    assert done.code == 0, done.err
    assert first.read_bytes().startswith(kept)
    assert "resumed from" in (tmp_path / "out/logs/w4a16-aligned-seed0.log").read_text()
    groups = json.loads((tmp_path / "out/comparison.json").read_text())["groups"]
    assert [(group["name"], group["seeds"]) for group in groups] == [("w4a16-aligned", [0, 1])]


def test_a_member_saves_and_ends_when_the_comparison_is_killed(qarl, tiny_model, tmp_path):
    config = configured(tmp_path, tiny_model("llama"), train={"steps": 100_000}, checkpoint={"every": 100_000})
    started = qarl.start("compare", config, "--schemes", "w8a8", "--out", "out", before=QUICK, cwd=tmp_path)
    run = tmp_path / "out/runs/w8a8-aligned-seed0"
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
        assert time.monotonic() < deadline, "no first step"
        time.sleep(0.02)
    os.kill(started.pid, signal.SIGKILL)
    while not (run / "checkpoints/latest").exists():
        assert time.monotonic() < deadline, "the member did not save"
        time.sleep(0.02)
    last = (run / "metrics.jsonl").read_bytes()
    time.sleep(0.5)
    assert (run / "metrics.jsonl").read_bytes() == last
