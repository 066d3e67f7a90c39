"""The phases of a start of vLLM, and the process that is launched before. Without vLLM."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import fake_sampler
import pytest
import torch
from tiny_runs import settings

from qarl.config import Config
from qarl.rollout.vllm.launch import prelaunch_sampler
from qarl.rollout.vllm.phases import Phases
from qarl.rollout.vllm.process import SamplerError
from qarl.weight_sync.sender import SamplerFault

CPU = torch.device("cpu")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


class Clock:
    """In place of the module `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("qarl.rollout.vllm.phases.time", made)
    return made


class Worker:
    """The steps of vLLM's, and its runner. clock: each step takes 0.02 s of it."""

    def __init__(self, clock: Clock) -> None:
        self.done: list[str] = []
        self.clock = clock
        self.runner = SimpleNamespace(capture_model=lambda: self._work("capture", 7))

    def _work(self, step: str, result: int | None = None) -> int | None:
        self.done.append(step)
        self.clock.now += 0.02
        return result

    def init_device(self) -> None:
        self._work("device")
        self.model_runner = self.runner

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self._work(f"load {load_dummy_weights}")

    def determine_available_memory(self) -> int | None:
        return self._work("profile", 5)

    def initialize_from_config(self, config: str) -> None:
        self._work(config)

    def compile_or_warm_up_model(self) -> int:
        self._work("warm")
        return self.model_runner.capture_model()


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> type:
    """vLLM's `WorkerWrapperBase`, as much of it as a start needs."""

    class WorkerWrapperBase:
        def init_worker(self, made: Worker) -> None:
            self.worker = made

    module = ModuleType("vllm.v1.worker.worker_base")
    module.WorkerWrapperBase = WorkerWrapperBase
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return WorkerWrapperBase


def test_the_phases_of_a_worker_follow_one_another_without_a_gap(wrapper: type, clock: Clock) -> None:
    phases, loaded, made = Phases(begun := clock.now), [], Worker(clock)
    before = wrapper.init_worker, made.runner.capture_model
    clock.now += 0.02
    phases.end("imports")
    with phases.time_worker(loaded.append):
        wrapped = wrapper()
        wrapped.init_worker(made)
        wrapped.worker.init_device()
        wrapped.worker.load_model(load_dummy_weights=True)
        assert wrapped.worker.determine_available_memory() == 5
        wrapped.worker.initialize_from_config("cache")
        assert wrapped.worker.compile_or_warm_up_model() == 7
    phases.end("ready")
    assert made.done == ["device", "load True", "profile", "cache", "warm", "capture"] and loaded == [made]
    parts = ["device", "weights", "compile", "profile", "kv_cache", "warm_up", "graphs"]
    assert list(phases.seconds) == ["imports", "engine", *parts, "ready"]
    working = {"imports", *parts} - {"compile"}
    assert phases.seconds == pytest.approx({part: 0.02 * (part in working) for part in phases.seconds})
    assert sum(phases.seconds.values()) == pytest.approx(clock.now - begun)
    assert phases.line().startswith(f"vLLM is ready after {0.02 * len(working):.2f} s: imports 0.02, ")
    assert ", weights 0.02, compile 0.00, " in phases.line()
    # What was put on vLLM's classes and objects is gone.
    assert before == (wrapper.init_worker, made.runner.capture_model)
    assert vars(made).keys() == {"done", "clock", "runner", "model_runner"}


def config(troubles: Path, **vllm) -> Config:
    rollout = {"engine": "vllm", "vllm": {"args": {"troubles": str(troubles)}, **vllm}}
    return Config.model_validate(settings(Path("models/tiny"), rollout=rollout))


LEARNER = """
import os, signal, subprocess, sys
fd = int(sys.argv[1])
command = [sys.executable, "-m", "qarl.rollout.child", str(fd), "fast", "0", str(os.getpid())]
print(subprocess.Popen(command, pass_fds=[fd]).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_sampler_whose_learner_is_killed_at_once_ends_though_its_connection_stays(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", LEARNER, str(theirs.fileno())]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, env=ENVIRONMENT) as learner:
            assert learner.stdout is not None
            assert fake_sampler.gone(int(learner.stdout.readline()))


def test_a_sampler_without_a_learner_ends_before_it_imports_anything() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, "-m", "qarl.rollout.child", "99", "fast", "0", str(gone.pid)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_prelaunched_process_that_died_fails_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sampler.install(monkeypatch.setattr)
    early = prelaunch_sampler(config(tmp_path / "troubles"), CPU, tmp_path)
    assert early is not None

    os.kill(early.pid, signal.SIGKILL)
    try:
        with pytest.raises(SamplerFault, match="SIGKILL"):
            early.start(fake_sampler.settings(tmp_path), {}, lambda responses, tokens: None)
        with pytest.raises(SamplerError, match="vLLM did not start: its process was ended by SIGKILL"):
            early.raise_if_ended()
    finally:
        early.close()


@pytest.mark.parametrize("vllm", [{"process": "inline"}, {"tensor_parallel": 2, "device": 0}])
def test_inline_and_spanning_samplers_are_not_prelaunched(vllm: dict, tmp_path: Path) -> None:
    assert prelaunch_sampler(config(tmp_path / "troubles", **vllm), CPU, tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_log_that_cannot_be_written_is_left_to_the_start(tmp_path: Path) -> None:
    files = fake_sampler.memory_files()
    assert prelaunch_sampler(config(tmp_path / "troubles"), CPU, tmp_path / "missing") is None
    assert fake_sampler.memory_files() == files
