"""Whole runs: what they print and leave, stopping, going back, going on, and disks that refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import ROOT, Finished, Qarl, settings, write_config

pytestmark = pytest.mark.slow

# A signal to itself at the start of the N-th rollout; twice: another one in the learner.
SIGNAL_IN_ROLLOUT = """
import os, signal
from qarl.rollout.native.engine import NativeEngine
real, calls = NativeEngine.generate, []
def generate(self, *arguments):
    calls.append(1)
    if len(calls) == N:
        os.kill(os.getpid(), signal.SIGNAL)
        if TWICE:
            os.kill(os.getpid(), signal.SIGNAL)
    return real(self, *arguments)
NativeEngine.generate = generate
"""


def signal_in_rollout(number: int, name: str, twice: bool = False) -> str:
    return SIGNAL_IN_ROLLOUT.replace("== N", f"== {number}").replace("SIGNAL)", f"{name})").replace("TWICE", str(twice))


class Runs:
    """Runs of one configuration in one folder."""

    def __init__(self, qarl: Qarl, model: Path, folder: Path) -> None:
        self.qarl, self.folder, self.run = qarl, folder, folder / "runs" / "c"
        self.config = write_config(folder / "c.yaml", settings(model, train={"steps": 2}, checkpoint={"every": 1}))

    def train(self, *overrides: str, before: str = "") -> Finished:
        return self.qarl.run("train", self.config, *overrides, before=before, cwd=self.folder)

    def steps(self) -> list[int]:
        return [json.loads(line)["step"] for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def checkpoints(self) -> list[str]:
        return sorted(p.name for p in (self.run / "checkpoints").iterdir())


@pytest.fixture
def runs(qarl, tiny_model, tmp_path) -> Runs:
    return Runs(qarl, tiny_model("llama"), tmp_path)


def test_a_run_leaves_its_directory_and_prints_nothing_but_its_own_lines(runs):
    done = runs.train()
    assert (done.code, done.err) == (0, "")
    assert {p.name for p in runs.run.iterdir()} == {
        ".lock", "config.yaml", "environment.json", "metrics.jsonl", "rewards.log", "rollouts", "checkpoints",
        "tensorboard",
    }  # fmt: skip
    lines = [line for line in done.out.splitlines() if not line.startswith(("model: ", "quantize: ", "tokenizer and"))]
    lines = [line for line in lines if not line.startswith(("reward workers: ", "rollout: ", "learner: "))]
    assert lines.pop(0).endswith("w4a16 (aligned learner), grpo: 2 steps in runs/c")
    starts = ["1000 prompts of ", *["step 1, sample "] * 3, "step 1/2  ", *["step 2, sample "] * 3, "step 2/2  ",
              "run: runs/c (2 steps in ", "reward/mean: ", "response/length_mean: ",
              "mismatch/delta_abs_max: 0 in every step: sampler and learner agree bit for bit", "to read its answers: ",
              "to see its curves: ", "to train it further: "]  # fmt: skip
    assert len(lines) == len(starts), done.out
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start), (line, start)


def test_the_command_that_it_ends_with_trains_further(runs):
    last = runs.train().out.splitlines()[-1]
    command = last.split(": ", 1)[1].split()
    assert Path(command[0]).name == "qarl" and command[1] == "train"
    done = runs.qarl.run(*command[1:], cwd=runs.folder)
    assert done.code == 0, done.err
    assert runs.steps() == [1, 2, 3, 4]


def test_every_metric_of_the_interface_is_logged(runs):
    runs.train("logging.tensorboard=false")
    record = json.loads((runs.run / "metrics.jsonl").read_text().splitlines()[0])
    interface = {
        "reward/mean", "reward/std", "response/length_mean", "response/truncated_frac", "policy/entropy",
        "policy/clip_frac", "policy/grad_norm", "mismatch/delta_abs_mean", "mismatch/delta_abs_max", "mismatch/k1",
        "mismatch/k3", "mismatch/ppl_ratio", "mismatch/chi2_token", "mismatch/chi2_seq", "quant/codes_changed_frac",
        "time/step_s", "time/rollout_s", "time/learner_s", "time/publish_s", "throughput/rollout_tokens_per_s",
        "throughput/learner_tokens_per_s", "memory/peak_gib",
    }  # fmt: skip
    assert interface <= record.keys(), interface - record.keys()
    assert record["mismatch/delta_abs_max"] == 0.0 and 0.0 < record["quant/codes_changed_frac"] < 1.0


def test_a_finished_run_is_left_as_it_is(runs):
    runs.train()
    before = (runs.run / "metrics.jsonl").read_bytes()
    done = runs.train()
    assert done.code == 0 and "(step 2)" in done.out
    assert (runs.run / "metrics.jsonl").read_bytes() == before


def test_a_signal_in_the_first_step_leaves_nothing_to_resume(runs):
    done = runs.train(before=signal_in_rollout(1, "SIGTERM"))
    assert done.code == 143 and "SIGTERM: stopping" in done.out
    assert runs.checkpoints() == [] and runs.steps() == []
    assert runs.train("optim.lr=2e-3").code == 0


def test_a_second_sigint_stops_at_once_without_saving(runs):
    done = runs.train("checkpoint.every=9", before=signal_in_rollout(2, "SIGINT", twice=True))
    assert (done.code, done.err) == (130, "")
    assert runs.steps() == [1] and runs.checkpoints() == []


def test_a_signal_while_starting_stops_at_once_and_leaves_nothing(runs):
    before = "import qarl.training.loop as loop, os, signal\nloop.build_run = lambda *_: os.kill(os.getpid(), signal."
    done = runs.train(before=before + "SIGINT)")
    assert (done.code, done.err) == (130, "")
    assert not (runs.folder / "runs").exists()


def test_stopped_with_resume_never_the_message_says_what_goes_on(runs):
    done = runs.train("checkpoint.resume=never", before=signal_in_rollout(2, "SIGINT"))
    assert "the same command with checkpoint.resume=auto goes on from there" in done.out
    assert runs.train("checkpoint.resume=never").code == 2
    assert runs.train("checkpoint.resume=auto").code == 0


def test_going_back_to_an_earlier_checkpoint_forgets_what_came_after(runs):
    runs.train("train.steps=3", "checkpoint.keep_last=0")
    done = runs.train("train.steps=2", "checkpoint.keep_last=0", f"checkpoint.resume={runs.run}/checkpoints/000001")
    assert done.code == 0, done.err
    assert runs.steps() == [1, 2] and runs.checkpoints() == ["000001", "000002", "latest"]


def test_starting_from_the_checkpoint_of_another_run_saves_it_again_when_stopped(runs):
    runs.train()
    other = runs.folder / "other"
    done = runs.train(f"train.run_dir={other}", f"checkpoint.resume={runs.run}/checkpoints/latest", "train.steps=3",
                      before=signal_in_rollout(1, "SIGINT"))  # fmt: skip
    assert done.code == 130, done.err
    assert (other / "checkpoints" / "000002").is_dir()


def test_a_checkpoint_of_another_model_is_refused_and_no_directory_is_made(runs, tiny_model):
    runs.train()
    other = f"train.run_dir={runs.folder}/other"
    resume = f"checkpoint.resume={runs.run}/checkpoints/latest"
    done = runs.train(other, resume, f"model.path={tiny_model('llama', intermediate_size=192)}")
    assert done.code == 2 and "made for another model" in done.err and done.err.count("\n") == 1
    assert not (runs.folder / "other").exists()


def test_a_damaged_checkpoint_is_passed_over(runs):
    runs.train()
    (runs.run / "checkpoints" / "000002" / "masters.safetensors").write_bytes(b"")
    done = runs.train()
    assert done.code == 0 and "warning: skipping checkpoint 2: " in done.out and "(step 1)" in done.out
    assert runs.steps() == [1, 2]


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(runs):
    runs.train()
    path = runs.run / "checkpoints" / "000002"
    (path / "state.json").write_text("{}")
    done = runs.train(f"checkpoint.resume={path}")
    assert done.code == 2 and "state.json: 2 bytes" in done.err and done.err.count("\n") == 1
    assert runs.checkpoints() == ["000001", "000002", "latest"]


def test_a_disk_that_fills_up_while_saving_keeps_the_previous_checkpoint(runs):
    runs.train("train.steps=1")
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    done = runs.train(before=full)
    assert done.code == 2 and done.err.startswith("error: runs/c/checkpoints/000002: cannot be written: File too large")
    assert done.err.count("\n") == 1 and runs.checkpoints() == ["000001", "latest"]
    assert runs.train().code == 0 and runs.steps() == [1, 2]


def test_a_reward_that_breaks_down_loses_no_finished_step(runs):
    (runs.folder / "judge.py").write_text(
        "import pathlib\n"
        "def judge(completions, prompts, **columns):\n"
        "    print('asked')\n"
        "    calls = pathlib.Path('calls'); calls.write_text(calls.read_text() + 'x' if calls.exists() else 'x')\n"
        "    assert calls.read_text() == 'x', 'the judge is away'\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    done = runs.train("reward.functions=[{name: 'judge.py:judge'}]", "checkpoint.every=9")
    assert done.code == 2 and "the judge is away" in done.err and done.err.count("\n") == 1
    assert runs.steps() == [1] and runs.checkpoints() == ["000001", "latest"]
    log = (runs.run / "rewards.log").read_text()
    assert "asked\n" in log and log.count("the judge is away") > 3


def test_nan_gradients_stop_the_run_with_one_line(runs):
    broken = (
        "import qarl.training.learner as learner\nbuild = learner.build_objective\n"
        "def nan(*sections):\n    objective = build(*sections)\n"
        "    def f(*a):\n        loss, stats = objective(*a)\n        return loss * float('nan'), stats\n    return f\n"
        "learner.build_objective = nan"
    )
    done = runs.train("train.max_skipped_steps=2", before=broken)
    assert done.code == 2 and "the gradient was not finite in 3 optimizer steps in a row" in done.err
    assert done.err.count("\n") == 1
    assert json.loads((runs.run / "metrics.jsonl").read_text())["policy/skipped_steps"] == 2.0


def test_a_process_of_its_own_is_stopped_by_sigterm(runs):
    program = [sys.executable, "-c", "from qarl.cli import main; main()", "train", str(runs.config), "train.steps=500"]
    path = os.pathsep.join([str(ROOT / part) for part in (".", "kernels", "quant_formats")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        program, cwd=runs.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step 2/500"):
                process.send_signal(signal.SIGTERM)
                break
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "saved; the same command goes on from there" in out and err == ""
