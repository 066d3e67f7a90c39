"""Whole runs: output, files, stopping, going back to a checkpoint, resuming, and full disks."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from run_faults import recorded
from safetensors.torch import load_file
from tiny_runs import ONE_PICTURE, Finished, Qarl, settings, write_config

pytestmark = pytest.mark.slow

# Sends a signal to its own process at the start of the N-th rollout. TWICE: sends it again at once.
SIGNAL_IN_ROLLOUT = """
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
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


INTERFACE = """
reward/mean reward/std response/length_mean response/truncated_frac policy/entropy policy/clip_frac policy/grad_norm
mismatch/delta_abs_mean mismatch/delta_abs_max mismatch/k1 mismatch/k3 mismatch/ppl_ratio mismatch/chi2_token
mismatch/chi2_seq quant/codes_changed_frac time/step_s time/rollout_s time/learner_s time/publish_s
throughput/rollout_tokens_per_s throughput/learner_tokens_per_s memory/peak_gib
"""


class Runs:
    """Runs of one configuration in one folder."""

    def __init__(self, qarl: Qarl, model: Path, folder: Path) -> None:
        self.qarl, self.folder, self.run = qarl, folder, folder / "runs" / "c"
        self.config = write_config(folder / "c.yaml", settings(model, train={"steps": 2}, checkpoint={"every": 1}))

    def train(self, *overrides: str, before: str = "") -> Finished:
        return self.qarl.run("train", self.config, *overrides, before=before, cwd=self.folder)

    def steps(self) -> list[int]:
        return [row["step"] for row in recorded(self.run)]

    def checkpoints(self) -> list[str]:
        return sorted(p.name for p in (self.run / "checkpoints").iterdir())


@pytest.fixture
def runs(qarl, tiny_model, tmp_path) -> Runs:
    return Runs(qarl, tiny_model("llama"), tmp_path)


@pytest.fixture(scope="module")
def trained(qarl, tiny_model, tmp_path_factory) -> tuple[Runs, Finished]:
    """A finished run, which tests must not change."""
    runs = Runs(qarl, tiny_model("llama"), tmp_path_factory.mktemp("trained"))
    return runs, runs.train()


@pytest.fixture
def finished(trained, runs) -> Runs:
    """A copy of the finished run, which a test may change."""
    shutil.copytree(trained[0].folder, runs.folder, symlinks=True, dirs_exist_ok=True)
    return runs


def test_a_run_leaves_its_directory_and_prints_nothing_but_its_own_lines(trained):
    runs, done = trained
    assert (done.code, done.err) == (0, "")
    files = ".lock config.yaml environment.json metrics.jsonl rewards.log "
    files += "rollouts checkpoints tensorboard diagnostics history.json"
    assert {p.name for p in runs.run.iterdir()} == set(files.split())
    lines = [line for line in done.out.splitlines() if not line.startswith(("model: ", "quantize: ", "tokenizer and"))]
    lines = [line for line in lines if not line.startswith(("reward workers: ", "rollout: ", "learner: "))]
    assert lines.pop(0).endswith("w4a16 (aligned learner), grpo: 2 steps in runs/c")
    starts = [
        "1000 prompts of ",
        *["step 1, sample "] * 3,
        "step 1/2  ",
        *["step 2, sample "] * 3,
        "step 2/2  ",
        "run: runs/c (2 steps in ",
        "reward/mean: ",
        "response/length_mean: ",
        "mismatch/delta_abs_max: 0 in every step: sampler and learner agree bit for bit",
        "to read its answers: ",
        "to see its curves: ",
        "to see it on a page: ",
        "to export it: ",
        "to compare with bf16: ",
        "to train it further: ",
    ]
    assert len(lines) == len(starts), done.out
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start), (line, start)


def test_the_command_that_it_ends_with_trains_further(trained, finished):
    command = trained[1].out.splitlines()[-1].split(": ", 1)[1].split()
    assert Path(command[0]).name == "qarl" and command[1] == "train"
    done = finished.qarl.run(*command[1:], cwd=finished.folder)
    assert done.code == 0, done.err
    assert finished.steps() == [1, 2, 3, 4]


def test_the_commands_that_it_ends_with_report_export_and_compare(runs):
    runs.run = runs.folder / "runs" / "a name"  # which a shell would split
    lines = runs.train(f"train.run_dir={runs.run}").out.splitlines()
    commands = {words[1]: words[1:] for line in lines if len(words := shlex.split(line.split(":  ", 1)[-1])) > 1}
    for name in ("report", "export", "compare"):
        done = runs.qarl.run(*commands[name], cwd=runs.folder, before=ONE_PICTURE)
        assert done.code == 0, (name, done.err)
    assert (runs.run / "report.html").exists() and (runs.run / "export" / "config.json").exists()
    comparison = json.loads((runs.folder / "runs" / "a name-compare" / "comparison.json").read_text())
    assert {member["scheme"]: member["state"] for member in comparison["members"]} == {
        "w4a16": "finished",
        "bf16": "finished",
    }


def test_every_metric_of_the_interface_is_logged(trained):
    record = recorded(trained[0].run)[0]
    missing = set(INTERFACE.split()) - record.keys()
    assert not missing, missing
    assert record["mismatch/delta_abs_max"] == 0.0 and 0.0 < record["quant/codes_changed_frac"] < 1.0


COSTLY = [f"diagnostics.{name}_every=1" for name in ("shadow", "deployed", "crossings", "gradients")]
LEARNER = ["quant.learner=full_precision", "model.learner_dtype=float32", "objective.kl_coef=0.1"]


def test_diagnostics_and_rollout_tensors_say_what_metrics_say_and_change_nothing(runs):
    done = runs.train(*LEARNER, "diagnostics.tokens=50")
    assert done.code == 0, done.err
    plain = recorded(runs.run)
    other = runs.folder / "watched"
    done = runs.train(*LEARNER, *COSTLY, "diagnostics.tokens=50", f"train.run_dir={other}")
    assert done.code == 0, done.err
    watched = recorded(other)
    for one, two in zip(plain, watched, strict=True):
        repeatable = [name for name in one if not name.startswith(("time/", "throughput/", "memory/"))]
        assert {name: one[name] for name in repeatable} == {name: two[name] for name in repeatable}
    new = watched[1].keys() - plain[1].keys()
    weights = {"quant/crossing_steps", "quant/sign_agreement"}
    assert weights | {"precision/phantom_frac", "deployed/efficiency", "gradients/cos_total"} <= new
    assert all(name.startswith(("precision/", "deployed/", "gradients/")) for name in new - weights)
    always = {"error_tokens/frac", "mismatch/ess", "policy/contribution_train_pos", "time/diagnostics_s"}
    assert always <= plain[0].keys()

    for run, records in ((runs.run, plain), (other, watched)):
        tensors = load_file(run / "rollouts" / "000002.safetensors")
        delta = (tensors["logp_old"] - tensors["logp_sampler"]).abs()
        assert float(delta.max()) == pytest.approx(records[1]["mismatch/delta_abs_max"], rel=1e-6)
        rows = [json.loads(line) for line in (run / "rollouts" / "000002.jsonl").read_text().splitlines()]
        for name in ("reward", "advantage"):
            assert tensors[f"{name}s"].tolist() == pytest.approx([row[name] for row in rows])
        record = json.loads((run / "diagnostics" / "000002.json").read_text())
        assert record["step"] == 2 and len(record["tokens"]["logp"]) == 50
        assert record["metrics"] == {name: value for name, value in records[1].items() if name != "step"}
        assert (record["layers"] is None) == (run == runs.run) == (record["tokens"]["logp_shadow"] is None)
    assert sum(changed for changed, _ in record["layers"].values()) == watched[1]["quant/codes_changed_count"]


def test_a_finished_run_is_left_as_it_is(finished):
    before = (finished.run / "metrics.jsonl").read_bytes()
    done = finished.train()
    assert done.code == 0 and "(step 2)" in done.out
    assert (finished.run / "metrics.jsonl").read_bytes() == before


def test_a_signal_in_the_first_step_leaves_nothing_to_resume(runs):
    done = runs.train(before=signal_in_rollout(1, "SIGTERM"))
    assert done.code == 143 and "SIGTERM: stopping" in done.out
    assert "stopped in step 1: nothing to save; rerun the same command to start over" in done.out
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
    done = runs.train("checkpoint.resume=never", before=signal_in_rollout(2, "SIGHUP"))
    assert done.code == 129 and runs.checkpoints() == ["000001", "latest"]
    assert "the same command with checkpoint.resume=auto resumes from there" in done.out
    assert runs.train("checkpoint.resume=never").code == 2
    assert runs.train("checkpoint.resume=auto").code == 0


def test_going_back_to_an_earlier_checkpoint_forgets_what_came_after(runs):
    runs.train("train.steps=3", "checkpoint.keep_last=0")
    done = runs.train("train.steps=2", "checkpoint.keep_last=0", f"checkpoint.resume={runs.run}/checkpoints/000001")
    assert done.code == 0, done.err
    assert runs.steps() == [1, 2] and runs.checkpoints() == ["000001", "000002", "latest"]


def test_a_checkpoint_of_another_model_is_refused_and_no_directory_is_made(finished, tiny_model):
    other = f"train.run_dir={finished.folder}/other"
    resume = f"checkpoint.resume={finished.run}/checkpoints/latest"
    done = finished.train(other, resume, f"model.path={tiny_model('llama', intermediate_size=192)}")
    assert done.code == 2 and "made for another model" in done.err and done.err.count("\n") == 1
    assert not (finished.folder / "other").exists()


def test_a_damaged_checkpoint_is_passed_over(finished):
    (finished.run / "checkpoints" / "000002" / "masters.safetensors").write_bytes(b"")
    done = finished.train()
    assert done.code == 0 and "warning: skipping checkpoint 2: " in done.out and "(step 1)" in done.out
    assert finished.steps() == [1, 2]
