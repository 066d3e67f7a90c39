"""`TensorParallelSampler`: its processes do the same and end together. Without vLLM, then with it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import fake_sampler
import pytest
import torch
from needs_vllm import needs_cpu_build
from run_faults import recorded
from test_engine_process import ORDER, Stop, ignore, stop
from tiny_runs import Qarl, settings, write_config

from qarl.rollout.vllm.own_kernels.tensor_parallel import TensorParallelSampler
from qarl.rollout.vllm.process import SamplerProcess
from qarl.weight_sync.fingerprints import PublishError
from qarl.weight_sync.sender import SamplerFault
from qarl.weight_sync.update import WeightUpdate


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TensorParallelSampler]]:
    """start(troubles of rank 0, of rank 1) -> a started sampler. Checks afterwards that nothing of it is left."""
    real = fake_sampler.FakeHost.__init__

    def own_troubles(self, settings, expected, phases) -> None:
        assert settings.shards == settings.arguments["tensor_parallel_size"] == 2
        assert settings.rendezvous.parent.stat().st_mode & 0o777 == 0o700
        own = {"troubles": f"{settings.arguments['troubles']}-{settings.shard}"}
        real(self, replace(settings, arguments=own), expected)

    monkeypatch.setattr(fake_sampler.FakeHost, "__init__", own_troubles)
    fake_sampler.install(monkeypatch.setattr)
    teams: list[TensorParallelSampler] = []

    def make(*troubles: str) -> TensorParallelSampler:
        for index in range(2):
            (tmp_path / f"troubles-{index}").write_text(troubles[index] if troubles else "")
        teams.append(TensorParallelSampler(torch.device("cpu"), [None, None], tmp_path / "sampler.log", 30.0))
        teams[-1].start(fake_sampler.settings(tmp_path), {}, ignore)
        return teams[-1]

    make.teams = teams
    yield make
    for team in teams:
        team.close()
        assert gone(team) and not team._folder.exists()


def gone(team: TensorParallelSampler) -> bool:
    return not any(fake_sampler.alive(member.pid) for member in team.members)


def test_a_team_answers_as_one_process_does(start, tmp_path) -> None:
    team = start()
    assert team.capabilities["proved_frac"] == 1.0
    responses = team.call("generate", ORDER, ignore)
    assert len(responses) == 8 and responses == team.members[1].call("generate", ORDER, ignore)
    assert team.call("score", [[1, 2, 3]], ignore) == [[fake_sampler.EVEN] * 2]
    assert {path.name for path in tmp_path.glob("*.log")} == {"sampler.log", "sampler.1.log"}


def test_each_process_gets_its_own_payload(start) -> None:
    from qarl.weight_sync.fingerprints import fingerprints

    team, tensors = start(), {"a": torch.randn(5), "b": torch.randn(3, 2)}
    payloads = [transport.pack(tensors) for transport in team.transports]
    update = WeightUpdate(1, payloads, fingerprints(tensors.items()), [[1, 2]])
    assert team.call("publish", update, ignore) == ({"score": ANY}, [[fake_sampler.EVEN]])
    wrong = replace(update, expected=fingerprints({"a": tensors["a"]}.items()))
    with pytest.raises(PublishError):  # of both
        team.call("publish", wrong, ignore)
    assert len(team.call("generate", ORDER, ignore)) == 8


@pytest.mark.parametrize(
    ("troubles", "message"),
    [
        (("", "generate kill"), "its process was ended by SIGKILL"),
        (("generate hang", "generate fail"), "RuntimeError: out of blocks"),
        (("", "start fail"), "out of blocks"),
    ],
)
def test_the_end_of_one_process_ends_all(start, troubles, message) -> None:
    with pytest.raises(SamplerFault, match=message):
        start(*troubles).call("generate", ORDER, ignore)
    assert gone(start.teams[-1])


def test_an_interrupt_ends_all(start) -> None:
    team = start("generate slow", "generate slow")
    with pytest.raises(Stop):
        team.call("generate", ORDER, stop)
    assert gone(team)
    with pytest.raises(SamplerFault):
        team.call("generate", ORDER, ignore)


def test_different_tokens_are_a_fault(start, monkeypatch) -> None:
    team, real = start(), SamplerProcess.poll

    def poll(self, seconds: float) -> bool:
        there = real(self, seconds)
        if there and self is team.members[1]:
            self.result[0].token_ids[0] += 1
        return there

    monkeypatch.setattr(SamplerProcess, "poll", poll)
    with pytest.raises(SamplerFault, match="sampled different tokens"):
        team.call("generate", ORDER, ignore)
    assert gone(team)


LISTENING = f"""
import json, sys
sys.path.append({str(Path(__file__).parent)!r})
from listening import listening
from qarl.rollout.vllm.own_kernels.tensor_parallel import TensorParallelSampler
real = TensorParallelSampler.begin
def begin(self, operation, payload):
    real(self, operation, payload)
    if operation == "generate":
        print("listening", json.dumps([what for member in self.members for what in listening(member.pid)]))
TensorParallelSampler.begin = begin
"""


@pytest.mark.slow
@needs_cpu_build
def test_a_model_in_two_parts_is_published_proved_and_trains(qarl_with_vllm: Qarl, tiny_model, tmp_path) -> None:
    shared = {path.name for path in Path("/dev/shm").iterdir()}
    data = settings(
        tiny_model(head_dim=32), rollout={"engine": "vllm", "vllm": {"tensor_parallel": 2}}, train={"steps": 2}
    )
    data["quant"] = {"scheme": "fp8"}
    config, run = write_config(tmp_path / "c.yaml", data), tmp_path / "run"
    done = qarl_with_vllm.run("train", config, f"train.run_dir={run}", before=LISTENING)
    assert done.code == 0, done.err
    assert {path.name for path in Path("/dev/shm").iterdir()} <= shared
    for record in recorded(run):
        assert record["publish/proved_frac"] == 1.0
        assert 0 < record["publish/canary_abs_max"] < 1 and 0 < record["mismatch/delta_abs_max"] < 1
    heard = [json.loads(line.removeprefix("listening ")) for line in done.out.splitlines() if "listening " in line]
    # Processes of one model talk to each other: on the loopback interface, and in their private directory.
    ways = {what.split(":")[0].rpartition("/")[0] or what.split(":")[0] for each in heard for what in each}
    assert heard and {way for way in ways if way != "tcp 0100007F" and "/qarl-team-" not in way} == set()
