"""Whole runs whose sampler or learner is killed, stopped or does not start; `fake_sampler` in place of vLLM."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import fake_sampler
import pytest
from tiny_runs import Finished, Qarl, Started, settings, write_config

pytestmark = pytest.mark.slow

INSTALL = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import fake_sampler; fake_sampler.install()"
UNREPEATABLE = ("time/", "throughput/", "memory/")


class Run:
    """Three steps of one configuration in `folder`; every start has the troubles that are given."""

    def __init__(self, qarl: Qarl, model: Path, folder: Path) -> None:
        self.qarl, self.folder, self.troubles = qarl, folder, folder / "troubles"
        vllm = {"args": {"troubles": str(self.troubles)}, "max_restarts": 0}
        data = settings(model, rollout={"engine": "vllm", "vllm": vllm}, train={"steps": 3}, checkpoint={"every": 100})
        self.config = write_config(folder / "c.yaml", data)

    def start(self, *troubles: str) -> Started:
        self.troubles.write_text("\n".join(troubles))
        return self.qarl.start("train", self.config, f"train.run_dir={self.folder / 'run'}", before=INSTALL)

    def run(self, *troubles: str) -> Finished:
        return self.start(*troubles).wait()

    def until_in_trouble(self) -> None:
        deadline = time.monotonic() + 60
        while self.troubles.read_text():
            assert time.monotonic() < deadline, "the troubles did not come"
            time.sleep(0.005)

    @property
    def sampler(self) -> int:
        return fake_sampler.pids(self.troubles)[-1]

    def metrics(self) -> list[dict[str, Any]]:
        records = map(json.loads, (self.folder / "run" / "metrics.jsonl").read_text().splitlines())
        return [{k: v for k, v in record.items() if not k.startswith(UNREPEATABLE)} for record in records]

    def checkpoint(self) -> str:
        return (self.folder / "run" / "checkpoints" / "latest").resolve().name


@pytest.fixture
def run(qarl, even_model, tmp_path) -> Run:
    return Run(qarl, even_model, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(qarl, even_model, tmp_path_factory) -> list[dict[str, Any]]:
    """The metrics of a run without troubles."""
    run = Run(qarl, even_model, tmp_path_factory.mktemp("undisturbed"))
    done = run.run()
    assert (done.code, done.err) == (0, "")
    return run.metrics()


def test_a_sampler_that_cannot_go_on_ends_the_run_with_its_steps_saved(run, undisturbed) -> None:
    done = run.run("generate none", "generate kill")
    assert done.code == 2
    assert done.err == (
        "error: rollout.vllm: vLLM failed: its process was ended by SIGKILL, perhaps for lack of memory; restarted 0 "
        f"times already (rollout.vllm.max_restarts), see {run.folder / 'run' / 'sampler.log'}\n"
    )
    assert run.checkpoint() == "000001" and run.metrics() == undisturbed[:1]
    again = run.run()
    assert again.code == 0 and "(step 1)" in again.out
    assert run.metrics() == undisturbed


def test_an_interrupt_while_the_sampler_draws_saves_and_leaves_no_process(run, undisturbed) -> None:
    started = run.start("generate none", "generate slow")
    run.until_in_trouble()
    os.kill(started.pid, signal.SIGINT)
    done = started.wait()
    assert (done.code, done.err) == (130, "")
    assert "stopped after step 1, saved" in done.out
    assert not fake_sampler.alive(run.sampler)
    assert run.run().code == 0
    assert run.metrics() == undisturbed


def test_a_sampler_does_not_outlive_a_learner_that_is_killed(run) -> None:
    started = run.start("generate hang")
    run.until_in_trouble()
    assert fake_sampler.alive(run.sampler)
    os.kill(started.pid, signal.SIGKILL)
    assert started.wait().code == -signal.SIGKILL
    assert fake_sampler.gone(run.sampler)


def test_a_sampler_that_does_not_start_keeps_its_log_and_the_command_can_be_repeated(run, undisturbed) -> None:
    log = run.folder / "run" / "sampler.log"
    done = run.run("start fail")
    assert done.code == 2
    assert done.err == f"error: rollout.vllm: vLLM did not start: RuntimeError: out of blocks; see {log}\n"
    assert "Traceback" in log.read_text() and [p.name for p in log.parent.iterdir()] == ["sampler.log"]
    assert run.run().code == 0
    assert run.metrics() == undisturbed


def test_a_publish_that_did_not_arrive_ends_the_run_after_the_step_before_it(run, undisturbed) -> None:
    done = run.run("generate none", "publish lie", "publish lie")
    assert done.code == 2
    assert done.err.startswith("error: publish of version ") and done.err.count("\n") == 1
    assert run.checkpoint() == "000001"
    assert run.run().code == 0
    assert run.metrics() == undisturbed
