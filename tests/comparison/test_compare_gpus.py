"""Placement of a comparison's members on several GPUs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from comparisons import settings_of, write_model

from qarl.comparison import start_members as launch
from qarl.comparison.plan import Member
from qarl.comparison.progress import ProgressView
from qarl.comparison.start_members import train_members, write_configs
from qarl.config import Config

BESIDE = {"engine": "vllm", "vllm": {"device": 1}}


class Ended:
    """A member's process that ends after `polls` polls."""

    def __init__(self, polls: int) -> None:
        self.polls = polls

    def poll(self) -> int | None:
        self.polls -= 1
        return 0 if self.polls < 0 else None

    def send_signal(self, signum: int) -> None: ...


def recorded(member: Member, steps: int) -> None:
    """Write metrics of `steps` steps; no file for 0 steps."""
    member.run_dir.mkdir()
    if steps:
        lines = "".join(json.dumps({"step": step}) + "\n" for step in range(1, steps + 1))
        (member.run_dir / "metrics.jsonl").write_text(lines)


def placed(
    tmp_path: Path, monkeypatch, gpus: list[str], jobs: int, *polls: int, device: str = "cuda", **sections: Any
) -> list[str | None]:
    """Return the GPU that each member was started on. polls: how long each trains."""
    monkeypatch.setattr(launch, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.0)
    settings = settings_of(write_model(tmp_path / "model"), **sections)
    settings["model"] |= {"device": device}
    members = [
        Member(f"m{number}", "w4a16", "aligned", number, tmp_path / str(number), Config.model_validate(settings))
        for number in range(len(polls))
    ]
    left, seen = list(polls), []

    def start(argv: list[str], log: BinaryIO, environment: Mapping[str, str]) -> Ended:
        assert set(environment) <= {"CUDA_VISIBLE_DEVICES"}
        seen.append(environment.get("CUDA_VISIBLE_DEVICES"))
        return Ended(left.pop(0))

    for member in members:
        recorded(member, 4)
    write_configs(members, tmp_path)
    with ProgressView(members) as view:
        monkeypatch.setattr(launch, "TrainProcess", start)
        assert train_members(members, tmp_path, view, jobs) is None
    assert [member.state for member in members] == ["finished"] * len(polls)
    return seen


@pytest.mark.parametrize(
    ("gpus", "jobs", "polls", "expected"),
    [
        (["3", "5"], 4, (9, 9, 9, 9), ["3", "5", "3", "5"]),
        (["0", "1"], 2, (1, 9, 1, 1), ["0", "1", "0", "0"]),  # the GPU with the fewest members
        (["0"], 2, (1, 1), [None, None]),
    ],
)
def test_members_are_spread_over_the_gpus(tmp_path, monkeypatch, gpus, jobs, polls, expected) -> None:
    assert placed(tmp_path, monkeypatch, gpus, jobs, *polls) == expected


@pytest.mark.parametrize("sections", [{"rollout": BESIDE}, {"device": "cpu"}])
def test_a_member_that_needs_several_gpus_or_none_sees_all(tmp_path, monkeypatch, sections) -> None:
    assert placed(tmp_path, monkeypatch, ["0", "1"], 2, 1, 1, **sections) == [None, None]


@pytest.mark.parametrize("steps", [0, 3, 4])
def test_exit_code_0_is_a_failure_unless_the_last_step_is_recorded(tmp_path, monkeypatch, steps) -> None:
    config = Config.model_validate(settings_of(write_model(tmp_path / "model")))  # of 4 steps
    member = Member("m", "w4a16", "aligned", 0, tmp_path / "run", config)
    recorded(member, steps)
    write_configs([member], tmp_path)
    monkeypatch.setattr(launch, "TrainProcess", lambda *_: Ended(1))
    with ProgressView([member]) as view:
        train_members([member], tmp_path, view)
    reason = f"ended with exit code 0 after step {steps} of 4"
    assert (member.state, member.reason) == (("finished", None) if steps == 4 else ("failed", reason))
