"""The sampler's process and the learner's handle of it: answers, faults, interrupts, the end. Without vLLM."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_sampler
import pytest
import torch
from tiny_runs import settings

from qarl.config import Config
from qarl.rollout.asynchronous.process import AsyncProcess
from qarl.rollout.engine import SamplingParams
from qarl.rollout.vllm import process
from qarl.rollout.vllm.channel import root_cause
from qarl.rollout.vllm.launch import prelaunch_sampler
from qarl.rollout.vllm.process import SamplerError, SamplerProcess
from qarl.rollout.vllm.settings import Request, Response
from qarl.weight_sync.fingerprints import PublishError
from qarl.weight_sync.sender import SamplerFault

ORDER = ([Request([5, 70], seed) for seed in range(8)], SamplingParams(1, 0, 8, stop_token_ids=frozenset({1})))


def ignore(responses: int, tokens: int) -> None:
    pass


class Stop(BaseException):
    """The exception of a user's interrupt."""


def stop(responses: int, tokens: int) -> None:
    if responses:
        raise Stop


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SamplerProcess]]:
    """start(*troubles, timeout_s=30) -> a started sampler. Checks afterwards that nothing of it is left.

    timeout_s: Applies after the start, so that a slow start on a busy machine does not count as a hang.
    """
    fake_sampler.install(monkeypatch.setattr)
    open_before = fake_sampler.memory_files()
    made: list[SamplerProcess] = []

    def make(*troubles: str, timeout_s: float = 30.0) -> SamplerProcess:
        (tmp_path / "troubles").write_text("\n".join(troubles))
        made.append(SamplerProcess(torch.device("cpu"), None, "fast", tmp_path / "sampler.log", 120.0))
        made[-1].start(fake_sampler.settings(tmp_path), {}, ignore)
        made[-1].timeout_s = timeout_s
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()
        assert not fake_sampler.alive(sampler.pid)
    assert fake_sampler.memory_files() == open_before


@pytest.fixture
def answer(start) -> list[Response]:
    """The answer to ORDER of a sampler without troubles."""
    return start().call("generate", ORDER, ignore)


def test_a_hang_of_an_asynchronous_sampler_names_its_own_key(tmp_path: Path, monkeypatch) -> None:
    fake_sampler.install(monkeypatch.setattr)
    (tmp_path / "troubles").write_text("generate hang")
    rollout = SimpleNamespace(engine="vllm", exact=False, asynchronous=SimpleNamespace(timeout_s=0.5))
    sampler = AsyncProcess(SimpleNamespace(rollout=rollout), torch.device("cpu"), None, tmp_path)
    try:
        sampler.begin_start(fake_sampler.settings(tmp_path), {})
        sampler.wait_until_ready(lambda: None)
        with pytest.raises(SamplerFault, match=r"no sign of life for 0.5 s \(rollout\.async\.timeout_s\)"):
            sampler.call("generate", ORDER, ignore)
    finally:
        sampler.close()


def test_a_slow_sampler_is_not_taken_for_hung(start, monkeypatch) -> None:
    sampler, clock, seen = start("generate slow", timeout_s=1.5), [0.0], []
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def most_of_its_time_goes_by(responses: int, tokens: int) -> None:
        if responses not in seen:
            clock[0] = sampler._deadline - 0.1
            seen.append(responses)

    assert len(sampler.call("generate", ORDER, most_of_its_time_goes_by)) == 8
    assert clock[0] > 1.5 and seen == sorted(seen) and 0 < seen[-1] <= 8


def test_a_failure_is_one_line_and_the_sampler_goes_on(start, answer, tmp_path) -> None:
    sampler = start("generate fail")
    with pytest.raises(SamplerFault) as fault:
        sampler.call("generate", ORDER, ignore)
    assert str(fault.value) == "RuntimeError: out of blocks"
    assert sampler.call("generate", ORDER, ignore) == answer
    assert all(words in (tmp_path / "sampler.log").read_text() for words in ("Traceback", "and a second line"))


@pytest.mark.parametrize(
    ("error", "cause", "context", "says"),
    [
        (PublishError("publish: vLLM's layer 'a': no"), ValueError("no"), None, "publish: vLLM's layer 'a': no"),
        (RuntimeError("failed"), PublishError("publish: no"), None, "publish: no"),
        (RuntimeError("failed"), None, ValueError("too\nlong"), "ValueError: too"),
    ],
)
def test_of_a_chain_of_errors_the_line_for_the_user_is_reported_else_the_first_cause(
    error, cause, context, says
) -> None:
    error.__context__ = context
    if cause is not None:
        error.__cause__ = cause
    assert root_cause(error) == says


def test_a_sampler_that_ignores_an_interrupt_is_ended(start, monkeypatch, tmp_path) -> None:
    def stop_in_trouble(responses: int, tokens: int) -> None:
        if not (tmp_path / "troubles").read_text():
            raise Stop

    monkeypatch.setattr(process, "ABORT_LIMIT_S", 0.3)
    sampler = start("generate hang")
    with pytest.raises(Stop):
        sampler.call("generate", ORDER, stop_in_trouble)
    assert not fake_sampler.alive(sampler.pid)
    with pytest.raises(SamplerFault, match="its process was killed because an order was interrupted"):
        sampler.call("generate", ORDER, ignore)


def test_what_libraries_print_goes_to_the_log(start, tmp_path, capfd) -> None:
    start("generate noise").call("generate", ORDER, ignore)
    assert (tmp_path / "sampler.log").read_text() == "noise from a library\nand on the other stream\n"
    assert capfd.readouterr() == ("", "")


def test_the_process_ends_with_its_connection(start) -> None:
    sampler = start()
    sampler._channel.close()
    assert fake_sampler.gone(sampler.pid)


def test_a_sampler_without_a_learner_ends_before_it_imports_anything() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, "-m", "qarl.rollout.child", "99", "fast", "0", str(gone.pid)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"")


def prelaunched(folder: Path, **vllm: Any) -> SamplerProcess | None:
    rollout = {"engine": "vllm", "vllm": {"args": {"troubles": str(folder / "troubles")}, **vllm}}
    config = Config.model_validate(settings(Path("models/tiny"), rollout=rollout))
    return prelaunch_sampler(config, torch.device("cpu"), folder)


def test_a_prelaunched_process_that_died_fails_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sampler.install(monkeypatch.setattr)
    early = prelaunched(tmp_path)
    os.kill(early.pid, signal.SIGKILL)
    with pytest.raises(SamplerFault, match="SIGKILL"):
        early.start(fake_sampler.settings(tmp_path), {}, ignore)
    with pytest.raises(SamplerError, match="vLLM did not start: its process was ended by SIGKILL"):
        early.raise_if_ended()
    early.close()


@pytest.mark.parametrize("vllm", [{"process": "inline"}, {"tensor_parallel": 2, "device": 0}])
def test_inline_and_spanning_samplers_are_not_prelaunched(vllm: dict, tmp_path: Path) -> None:
    assert prelaunched(tmp_path, **vllm) is None
