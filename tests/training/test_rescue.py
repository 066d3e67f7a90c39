"""An exception at any place of the loop loses no finished step, and the run can be resumed afterwards."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_faults import repeatable
from tiny_runs import settings
from torch import Tensor

from qarl.config import Config
from qarl.distributed.ranks import Ranks
from qarl.errors import UserError
from qarl.policy.policy import Policy
from qarl.rollout.native.engine import NativeEngine
from qarl.storage import rundir
from qarl.storage.checkpoint import CheckpointStore
from qarl.storage.environment import describe_environment
from qarl.terminal.run_console import RunConsole
from qarl.training import checkpoint_manager as keeper
from qarl.training import loop, step
from qarl.training.metrics import Clock
from qarl.training.recorder import Recorder
from qarl.training.setup import Run
from qarl.training.state import capture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

AT = 2  # the step in which the fault is


class Boom(RuntimeError):
    """An exception that no code catches by its class."""


class Tiny:
    """Runs of a tiny configuration in this process. They share a model, which is reset at the start of each run."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.data = settings(model, train={"prompts_per_step": 2, "minibatch_size": 4}, logging={"tensorboard": False})
        self.folder, self.run, self.reference = folder, folder / "run", folder / "reference"
        self._parts: tuple[Run, dict[str, dict[str, Tensor]], dict[str, Any]] | None = None
        self._build = loop.build_run

    def train(self, run_dir: Path | None = None, steps: int = AT, every: int = 9, keep_last: int = 2) -> int:
        train = {**self.data["train"], "steps": steps, "run_dir": str(run_dir or self.run)}
        sections = {"train": train, "checkpoint": {"every": every, "keep_last": keep_last}}
        return loop.train(Config.model_validate({**self.data, **sections}))

    def assert_as_reference(self, but: str | None = None) -> None:
        """Compare checkpoint and rollouts with the reference. but: Name of a step whose rollouts may be missing."""
        last = (self.run / "checkpoints" / "latest").resolve().name
        assert files(self.run / "checkpoints" / last) == files(self.reference / "checkpoints" / last)
        for name, data in files(self.reference / "rollouts").items():
            if name <= f"{last}z" and not (but and name.startswith(but)):
                assert (self.run / "rollouts" / name).read_bytes() == data, name

    def build_run(self, config: Config, device: torch.device, console: RunConsole, log: Path, ranks: Ranks) -> Run:
        if self._parts is None:
            run = self._build(config, device, console, log, ranks)
            pieces, state = capture(run, run.stream.state())
            kept: dict[str, dict[str, Tensor]] = {"masters": {}, "optimizer": {}}
            for piece in pieces:
                kept[piece.group][piece.name] = piece.values.view(piece.shape).clone()
            self._parts = run, kept, state
        run, tensors, state = self._parts
        with torch.no_grad():
            for name, parameter in run.policy.named_parameters():
                parameter.copy_(tensors["masters"][name])
                parameter.grad = None
        run.stream.load_state(state["data"])
        run.updates.optimizer.load_state(state["optimizer"], lambda name, _: tensors["optimizer"][name])
        run.learner.skipped_in_a_row = 0
        run.policy.refresh(state["version"])
        shared = SimpleNamespace(**vars(run))
        shared.close = lambda: None
        return shared

    def close(self) -> None:
        if self._parts is not None:
            self._parts[0].close()


@pytest.fixture(scope="module")
def tiny(tiny_model, tmp_path_factory) -> Iterator[Tiny]:
    tiny = Tiny(tiny_model("llama"), tmp_path_factory.mktemp("rescue"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_run", tiny.build_run)
        patch.setattr(os, "fsync", lambda fd: None)  # nothing is killed here
        environment = describe_environment(0, {})
        patch.setattr(rundir, "describe_environment", lambda *_: environment)
        assert tiny.train(tiny.reference, steps=4, every=1, keep_last=0) == 0
        yield tiny
    tiny.close()


@pytest.fixture(autouse=True)
def fresh(tiny) -> None:
    shutil.rmtree(tiny.run, ignore_errors=True)


def checkpoints(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Place of the fault: object, attribute, calls of it per step, whether to raise after the call's own work, and the step
# that must be saved afterwards. That is the step with the fault if the learner had ended, else the one before; 0 (none)
# if the weights were being changed.
PLACES: dict[str, tuple[Any, str, int, bool, int]] = {
    "generate": (NativeEngine, "generate", 1, False, AT - 1),
    "refresh": (Policy, "refresh", 2, False, 0),
    "finished learning": (step, "learn", 1, True, 0),
    "wake": (NativeEngine, "wake", 2, False, AT),
    "publish": (NativeEngine, "publish", 1, False, AT),
    "clock": (Clock, "metrics", 1, False, AT),
    "log, at its end": (Recorder, "log", 1, True, AT),
    "trackers": (Recorder, "track", 1, False, AT),
}


def fault(real: Callable[..., Any], calls: int, after: bool, error: Exception) -> Callable[..., Any]:
    """Wrap `real` so that call number `calls` raises `error`, before or after its own work."""
    count = 0

    def faulty(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        if count == calls and not after:
            raise error
        result = real(*arguments, **keywords)
        if count == calls:
            raise error
        return result

    return faulty


# Additional calls before the one in which the fault is raised.
BEFORE = {"wake": 1, "publish": 1, "refresh": 2}


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_anywhere_loses_at_most_the_step_it_is_in(tiny, place, monkeypatch, capsys):
    owner, name, per_step, after, kept = PLACES[place]
    calls = (AT - 1) * per_step + 1 + BEFORE.get(place, 0)
    with monkeypatch.context() as patch, pytest.raises(Boom, match="odd"):
        patch.setattr(owner, name, fault(getattr(owner, name), calls, after, Boom("odd")))
        tiny.train()
    said = capsys.readouterr().out.splitlines()[-1]
    if kept:
        assert said == f"step {kept} is saved; the same command resumes from there"
        assert checkpoints(tiny.run) == [f"{kept:06d}", "latest"]
    else:
        assert said == (
            f"warning: step {AT - 1} is not saved (the interrupted step had already changed the "
            "weights); the same command starts over"
        )
        assert checkpoints(tiny.run) == []
    assert [row["step"] for row in repeatable(tiny.run)] == list(range(1, (kept or AT - 1) + 1))
    assert tiny.train() == 0
    tiny.assert_as_reference(but=f"{AT:06d}" if kept == AT else None)
    ours, theirs = repeatable(tiny.run), repeatable(tiny.reference)[:AT]
    if place == "clock":  # the step was finished without its records
        assert ours[AT - 1].items() <= theirs[AT - 1].items() and "policy/loss" in ours[AT - 1]
        ours[AT - 1] = theirs[AT - 1]
    assert ours == theirs


def test_weights_that_are_half_way_leave_the_newest_checkpoint(tiny, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(Boom):
        patch.setattr(step, "learn", fault(step.learn, 4, True, Boom("odd")))
        tiny.train(steps=4, every=2)
    said = capsys.readouterr().out.splitlines()[-1]
    assert checkpoints(tiny.run) == ["000002", "latest"] and len(repeatable(tiny.run)) == 3
    assert said.startswith("warning: step 3 is not saved (") and said.endswith("; the same command resumes from step 2")
    assert tiny.train(steps=4) == 0
    tiny.assert_as_reference()
    assert repeatable(tiny.run) == repeatable(tiny.reference)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [(CheckpointStore, "save", UserError("the disk is full")), (keeper, "write_history", Boom("odd"))],
)
def test_a_save_that_fails_is_not_tried_again(tiny, owner, name, error, monkeypatch, capsys):
    calls: list[int] = []

    def refuse(*arguments: Any) -> None:
        calls.append(1)
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error), match=str(error)):
        patch.setattr(owner, name, refuse)
        tiny.train(every=2)
    said = capsys.readouterr().out.splitlines()[-1]
    assert len(calls) == 1
    assert (
        said
        == {
            "save": "warning: step 2 is not saved (its checkpoint could not be written); the same command starts over",
            "write_history": "step 2 is saved; the same command resumes from there",
        }[name]
    )
    assert tiny.train() == 0 and repeatable(tiny.run) == repeatable(tiny.reference)[:AT]


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), OSError(12, "Cannot allocate memory")],
)
def test_running_out_of_memory_is_one_line_with_a_fix_and_saves(tiny, error, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"^out of memory \(.*; lower train") as caught:
        patch.setattr(step, "learn", fault(step.learn, 2, False, error))
        tiny.train()
    assert "\n" not in str(caught.value) and checkpoints(tiny.run) == ["000001", "latest"]


def test_metrics_that_lack_the_last_step_are_no_success(tiny, monkeypatch):
    """Exit code 0 says that the last step is recorded, whatever happened to the file."""
    metrics = tiny.run / "metrics.jsonl"
    monkeypatch.setattr(Recorder, "close", lambda self: metrics.write_text(""))
    with pytest.raises(UserError, match=rf"^{metrics}: ends with step 0, not with train\.steps = {AT}"):
        tiny.train()
