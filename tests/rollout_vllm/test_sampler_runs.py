"""One run, again and again: its sampler does not start, is killed, outlives a learner, and is interrupted.

`fake_sampler` is in place of vLLM.
"""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import fake_sampler
import pytest
from run_faults import repeatable
from tiny_runs import Qarl, settings, write_config

pytestmark = pytest.mark.slow

INSTALL = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import fake_sampler; fake_sampler.install()"


class Course:
    """One training command that is started several times, each time with its own troubles."""

    def __init__(self, qarl: Qarl, model: Path, folder: Path) -> None:
        self.qarl, self.run, self.troubles = qarl, folder / "run", folder / "troubles"
        vllm = {"args": {"troubles": str(self.troubles)}, "max_restarts": 0}
        rollout = {"engine": "vllm", "numerics": "fast", "vllm": vllm}
        data = settings(model, rollout=rollout, train={"steps": 2}, checkpoint={"every": 100})
        self.config = write_config(folder / "c.yaml", data)

    def stage(self, *troubles: str, signum: int = 0) -> SimpleNamespace:
        """Run the command. Returns how it ended, `files` and `steps` of its directory, the last checkpoint (`saved`),
        and whether its sampler `outlived` it. signum: Signal to send to the learner after the last trouble."""
        self.troubles.write_text("\n".join(troubles))
        started = self.qarl.start("train", self.config, f"train.run_dir={self.run}", before=INSTALL)
        if signum:
            deadline = time.monotonic() + 300
            while self.troubles.read_text():
                assert time.monotonic() < deadline, "the troubles did not come"
                time.sleep(0.005)
            os.kill(started.pid, signum)
        done = started.wait()
        return SimpleNamespace(
            **vars(done),
            files={path.name for path in self.run.iterdir()},
            saved=(self.run / "checkpoints" / "latest").resolve().name,
            steps=repeatable(self.run),
            outlived=not fake_sampler.gone(fake_sampler.pids(self.troubles)[-1]),
        )


@pytest.fixture(scope="module")
def undisturbed(qarl, even_model, tmp_path_factory) -> SimpleNamespace:
    """A run without troubles."""
    return Course(qarl, even_model, tmp_path_factory.mktemp("undisturbed")).stage()


@pytest.fixture(scope="module")
def course(qarl, even_model, tmp_path_factory) -> dict[str, SimpleNamespace]:
    course = Course(qarl, even_model, tmp_path_factory.mktemp("course"))
    return {
        "no start": course.stage("start fail"),
        "sampler killed": course.stage("generate none", "generate kill"),
        "learner killed": course.stage("generate hang", signum=signal.SIGKILL),
        "interrupted": course.stage("generate endless", signum=signal.SIGINT),
        "finished": course.stage(),
    }


def test_a_sampler_that_does_not_start_leaves_its_log_and_nothing_else(course) -> None:
    stage = course["no start"]
    assert stage.code == 2
    assert stage.err.startswith("error: rollout.vllm: vLLM did not start: RuntimeError: out of blocks; see ")
    assert stage.err.endswith("/run/sampler.log\n") and stage.err.count("\n") == 1
    assert stage.files == {"sampler.log"}


def test_a_sampler_that_may_not_be_restarted_ends_the_run_with_its_steps_saved(course, undisturbed) -> None:
    stage = course["sampler killed"]
    assert stage.code == 2
    assert stage.err.startswith(
        "error: rollout.vllm: vLLM failed: its process was ended by SIGKILL, perhaps for lack of memory; restarted 0 "
        "times already (rollout.vllm.max_restarts); see "
    )
    assert stage.err.count("\n") == 1
    assert stage.saved == "000001" and stage.steps == undisturbed.steps[:1]


def test_a_sampler_does_not_outlive_a_learner_that_is_killed(course) -> None:
    stage = course["learner killed"]
    assert stage.code == -signal.SIGKILL
    assert not stage.outlived


def test_an_interrupt_while_the_sampler_draws_stops_the_run_and_the_sampler(course) -> None:
    stage = course["interrupted"]
    assert (stage.code, stage.err) == (130, "")
    assert "stopped after step 1, saved" in stage.out
    assert not stage.outlived


def test_the_finished_run_equals_an_undisturbed_one(course, undisturbed) -> None:
    stage = course["finished"]
    assert (stage.code, stage.err) == (0, "") == (undisturbed.code, undisturbed.err)
    assert "(step 1)" in stage.out  # resumed from there
    assert stage.steps == undisturbed.steps and len(stage.steps) == 2
    assert stage.files == undisturbed.files
