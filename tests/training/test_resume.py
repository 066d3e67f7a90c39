"""A run that is stopped anywhere and resumed with the same command leaves the same files as an undisturbed run."""

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from run_faults import repeatable
from tiny_runs import Finished, Qarl, settings, write_config

pytestmark = pytest.mark.slow

# Dies of SIGKILL in the middle of the N-th of its writes: metrics, rollouts, and every file of a checkpoint.
DIE_AT_WRITE = """
import os, signal
count, real = 0, os.fsync
def fsync(fd):
    global count
    count += 1
    if count == N:
        os.kill(os.getpid(), signal.SIGKILL)
    real(fd)
os.fsync = fsync
"""

# Gets SIGNUM a moment after its N-th write: by a thread of its own, which no load of the machine makes too late.
SIGNAL_AFTER_WRITE = """
import os, threading
count, real = 0, os.fsync
def fsync(fd):
    global count
    count += 1
    if count == N:
        threading.Timer(DELAY, os.kill, (os.getpid(), SIGNUM)).start()
    real(fd)
os.fsync = fsync
"""

RECIPE: dict[str, Any] = {
    "objective": {"name": "tbpo"},
    "optim": {"name": "muon", "lr": 1e-3, "warmup_steps": 4, "schedule": "cosine"},
    "train": {"epochs": 2},
    "data": {"task": {"size": 9}},
    "quant": {"scheme": "w8a8", "group_size": None},
}


def assert_same_run(run: Path, reference: Path) -> None:
    assert repeatable(run) == repeatable(reference)
    for folder in ("rollouts", "checkpoints/000004", "checkpoints/latest"):
        files = {path.name: path.read_bytes() for path in (run / folder).iterdir()}
        assert files == {path.name: path.read_bytes() for path in (reference / folder).iterdir()}, folder


def steps_recorded(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Resumed:
    """One configuration, run without interruptions in `reference`, and with interruptions in `run`."""

    def __init__(self, qarl: Qarl, model: Path, folder: Path) -> None:
        self.qarl, self.run, self.reference = qarl, folder / "run", folder / "reference"
        self.config = write_config(folder / "c.yaml", settings(model, **RECIPE))
        self.again(self.reference)

    def again(self, run: Path | None = None) -> Finished:
        done = self.qarl.run("train", self.config, f"train.run_dir={run or self.run}")
        assert done.code == 0, done.err
        return done

    def interrupted(self, before: str) -> Finished:
        """Run until the code in `before` ends the process."""
        return self.qarl.run("train", self.config, f"train.run_dir={self.run}", before=before)

    def signalled(self, signum: int, write: int, delay: float) -> Finished:
        """Run, and send the signal `delay` seconds after write number `write`."""
        return self.interrupted(f"N, DELAY, SIGNUM = {write}, {delay}, {int(signum)}" + SIGNAL_AFTER_WRITE)


@pytest.fixture(scope="module")
def resumed(qarl, tiny_model, tmp_path_factory):
    return Resumed(qarl, tiny_model("llama"), tmp_path_factory.mktemp("resumed"))


@pytest.fixture(autouse=True)
def fresh(resumed):
    """Remove `run`, so that every test begins a new one."""
    shutil.rmtree(resumed.run, ignore_errors=True)


def test_killed_in_the_middle_of_random_writes(resumed):
    rng = random.Random(2)
    codes = []
    # A step has 7 writes, a checkpoint 9. The first checkpoint is complete after 27: before that, after it, later.
    for first, last in ((5, 26), (28, 42), (5, 38)):
        before = DIE_AT_WRITE.replace("N:", f"{rng.randint(first, last)}:")
        codes.append(resumed.interrupted(before).code)
    assert (resumed.run / "checkpoints" / "latest").exists()
    resumed.again()
    assert codes == [-signal.SIGKILL] * 3
    assert_same_run(resumed.run, resumed.reference)


def test_stopped_by_signals(resumed):
    rng = random.Random(3)
    # A step has 7 writes, and 9 more of a checkpoint; the first of a run come after 4 others.
    first = resumed.signalled(signal.SIGINT, rng.randint(5, 18), rng.uniform(0.0, 0.05))
    assert first.code == 130, first.err
    stopped = steps_recorded(resumed.run)
    assert f"stopped after step {stopped}, saved; the same command resumes from there" in first.out
    assert first.err == ""
    assert (resumed.run / "checkpoints" / "latest").resolve().name == f"{stopped:06d}"
    second = resumed.signalled(signal.SIGTERM, rng.randint(5, 11), rng.uniform(0.0, 0.05))
    assert second.code == 143, second.err
    assert f"resumed from {resumed.run}/checkpoints/{stopped:06d} (step {stopped})" in second.out
    resumed.again()
    assert_same_run(resumed.run, resumed.reference)
