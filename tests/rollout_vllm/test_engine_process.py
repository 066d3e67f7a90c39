"""The sampler's process and the learner's handle of it: answers, faults, interrupts, the end. Without vLLM."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import fake_sampler
import pytest
import torch

from qarl.rollout.asynchronous.process import AsyncProcess
from qarl.rollout.engine import SamplingParams
from qarl.rollout.vllm import process
from qarl.rollout.vllm.channel import Channel, root_cause
from qarl.rollout.vllm.process import SamplerProcess
from qarl.rollout.vllm.settings import Request, Response
from qarl.weight_sync.fingerprints import PublishError
from qarl.weight_sync.sender import SamplerFault

ORDER = ([Request([5, 70], seed) for seed in range(8)], SamplingParams(1, 0, 8, stop_token_ids=frozenset({1})))


def ignore(responses: int, tokens: int) -> None:
    pass


class Stop(BaseException):
    """What the user's interrupt raises."""


def stop(responses: int, tokens: int) -> None:
    if responses:
        raise Stop


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SamplerProcess]]:
    """start(*troubles, timeout_s=30) -> a sampler that is ready; afterwards nothing of it may be left.

    timeout_s: once it is ready, so that a start on a busy machine is no hang.
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
    """What an undisturbed sampler answers to ORDER."""
    return start().call("generate", ORDER, ignore)


def test_a_crash_in_the_middle_of_an_operation_names_the_signal(start) -> None:
    with pytest.raises(SamplerFault) as fault:
        start("generate crash").call("generate", ORDER, ignore)
    assert str(fault.value) == "its process was ended by SIGSEGV"


def test_a_death_between_two_operations_is_found_at_the_next(start) -> None:
    sampler = start("sleep kill")
    sampler.begin("sleep", 1)
    assert fake_sampler.gone(sampler.pid)
    with pytest.raises(SamplerFault, match="SIGKILL"):
        sampler.call("generate", ORDER, ignore)


def test_a_hang_of_an_asynchronous_sampler_names_its_own_key(tmp_path: Path, monkeypatch) -> None:
    fake_sampler.install(monkeypatch.setattr)
    (tmp_path / "troubles").write_text("generate hang")
    sampler = AsyncProcess(torch.device("cpu"), None, "fast", tmp_path / "sampler.log", 0.5, vllm=True)
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
    assert clock[0] > 1.0 and seen == sorted(seen) and 0 < seen[-1] <= 8


def test_a_long_answer_that_still_arrives_is_not_taken_for_a_hang(start, monkeypatch) -> None:
    sampler, clock, seen = start("generate trickle", timeout_s=1.5), [0.0], []
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def most_of_its_time_goes_by(responses: int, tokens: int) -> None:
        if sampler._channel.received not in seen:
            clock[0] = sampler._deadline - 0.1
            seen.append(sampler._channel.received)

    assert sampler.call("generate", ORDER, most_of_its_time_goes_by) == list(range(1000))
    assert clock[0] > 1.5


@pytest.mark.parametrize("full", [False, True], ids=["log", "log on a full disk"])
def test_a_failure_is_one_line_and_the_sampler_goes_on(start, answer, tmp_path, full: bool) -> None:
    log = tmp_path / "sampler.log"
    if full:
        log.unlink()
        log.symlink_to("/dev/full")
    sampler = start("generate fail")
    with pytest.raises(SamplerFault) as fault:
        sampler.call("generate", ORDER, ignore)
    assert str(fault.value) == "RuntimeError: out of blocks"
    assert sampler.call("generate", ORDER, ignore) == answer
    assert full or all(words in log.read_text() for words in ("Traceback", "and a second line"))


@pytest.mark.parametrize(
    ("error", "cause", "context", "says"),
    [
        (PublishError("publish: vLLM's layer 'a': no"), ValueError("no"), None, "publish: vLLM's layer 'a': no"),
        (RuntimeError("failed"), PublishError("publish: no"), None, "publish: no"),
        (RuntimeError("failed"), None, ValueError("too\nlong"), "ValueError: too"),
        (RuntimeError(), ValueError("why"), KeyError("x"), "ValueError: why"),
        (RuntimeError(), None, None, "RuntimeError"),
    ],
)
def test_of_a_chain_of_errors_the_line_for_the_user_is_reported_else_the_first_cause(
    error, cause, context, says
) -> None:
    error.__context__ = context
    if cause is not None:
        error.__cause__ = cause
    assert root_cause(error) == says


def test_an_error_that_another_replaced_is_not_its_cause() -> None:
    error = ValueError("no such dtype")
    error.__context__, error.__suppress_context__ = KeyError("float7"), True  # from None
    assert root_cause(error) == "ValueError: no such dtype"


def test_the_last_message_of_a_process_that_ends_is_read(start, tmp_path, monkeypatch) -> None:
    listen, here, looked = Channel.poll, os.getpid(), []

    def look(channel: Channel, limit_s: float | None):
        if looked or os.getpid() != here:  # the sampler's own end, in its fork
            return listen(channel, limit_s)
        looked.append(channel)  # it found nothing, and all the rest of the sampler's life comes before what follows
        while not (pids := fake_sampler.pids(tmp_path / "troubles")):
            time.sleep(0.01)
        assert fake_sampler.gone(pids[0])
        return None

    monkeypatch.setattr(Channel, "poll", look)
    with pytest.raises(SamplerFault, match="RuntimeError: out of blocks"):
        start("start fail")
    assert len(looked) == 1


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


def test_a_second_interrupt_ends_it_at_once(start, monkeypatch) -> None:
    def press(responses: int, tokens: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SamplerProcess, "_abort", lambda self: pytest.fail("it waits for the sampler to let go"))
    sampler = start("generate hang")
    with pytest.raises(KeyboardInterrupt):
        sampler.call("generate", ORDER, press)
    assert not fake_sampler.alive(sampler.pid)


def test_what_libraries_print_goes_to_the_log(start, tmp_path, capfd) -> None:
    start("generate noise").call("generate", ORDER, ignore)
    assert (tmp_path / "sampler.log").read_text() == "noise from a library\nand on the other stream\n"
    assert capfd.readouterr() == ("", "")


def test_the_process_ends_with_its_connection(start) -> None:
    sampler = start()
    sampler._channel.close()
    assert fake_sampler.gone(sampler.pid)
