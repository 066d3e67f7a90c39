"""metrics.jsonl, rollouts and trackers."""

import json
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from full_disk import fill_disk
from safetensors.torch import load_file

from qarl.config.logging import LoggingConfig
from qarl.errors import UserError
from qarl.storage.runs import read_metrics
from qarl.training.recorder import Recorder
from qarl.training.trackers import TRACKERS


def settings(**values) -> LoggingConfig:
    return LoggingConfig(**{"tensorboard": False, **values})


def strict(line: str) -> dict:
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))


def test_each_step_is_one_line_on_disk_at_once_with_null_for_what_json_cannot_say(tmp_path):
    recorder = Recorder(tmp_path, settings())
    recorder.log(1, {"reward/mean": 0.1, "count": 3, "loss": torch.tensor(0.5)})
    line = '{"step": 1, "reward/mean": 0.1, "count": 3, "loss": 0.5}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == line
    recorder.log(2, {"a": float("nan"), "b": float("inf"), "c": -0.0})
    recorder.rollouts(1, [{"reward": float("nan"), "logprobs": {"min": float("-inf")}, "completion": "\ud800"}])
    found = strict((tmp_path / "metrics.jsonl").read_text().removeprefix(line))
    assert found == {"step": 2, "a": None, "b": None, "c": -0.0}
    assert strict((tmp_path / "rollouts" / "000001.jsonl").read_text()) == {
        "step": 1,
        "reward": None,
        "logprobs": {"min": None},
        "completion": "\ud800",
    }


@pytest.mark.parametrize("torn", [b'\n{"step": 2, "x": 0.', b"\n\x00\x00", b""])
def test_a_torn_last_line_goes_and_one_that_lost_its_newline_stays(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "x": 1}' + torn)
    assert read_metrics(path) == [{"step": 1, "x": 1}]
    with Recorder(tmp_path, settings()) as recorder:
        recorder.truncate(5)
        recorder.log(2, {"x": 2})
    assert path.read_bytes() == b'{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n'


def test_a_full_disk_is_a_user_error_and_takes_the_partial_line_back(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path, settings())
    recorder.log(1, {"x": 1})

    with monkeypatch.context() as patch:
        fill_disk(patch)
        with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written: No space .*bytes needed") as caught:
            recorder.log(2, {"x": 2})
    assert "\n" not in str(caught.value)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 1}]


TENSORS = {"logp": torch.tensor([0.5, -torch.inf]), "groups": torch.tensor([3], dtype=torch.int32)}


def test_tensors_of_a_step_lie_beside_its_rows(tmp_path):
    Recorder(tmp_path, settings()).rollouts(7, [{"completion": "a"}], TENSORS)
    Recorder(tmp_path, settings(rollout_tensors=False)).rollouts(8, [{"completion": "a"}], TENSORS)
    found = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert found == ["000007.jsonl", "000007.safetensors", "000008.jsonl"]
    read = load_file(tmp_path / "rollouts" / "000007.safetensors")
    assert read.keys() == TENSORS.keys() and all(torch.equal(read[name], TENSORS[name]) for name in read)
    assert read["groups"].dtype == torch.int32


def test_going_back_removes_later_steps_and_nothing_else(tmp_path):
    with Recorder(tmp_path, settings()) as recorder:
        for step in (1, 2, 3):
            recorder.log(step, {"x": step / 3})
            recorder.rollouts(step, [{"completion": str(step)}], TENSORS)
            recorder.diagnostics(step, {"step": step})
    for folder in ("rollouts", "diagnostics"):
        (tmp_path / folder / "000009.txt").write_text("mine")
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with Recorder(tmp_path, settings()) as recorder:
        recorder.truncate(2)
        recorder.log(3, {"x": 7})
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines[0] + lines[1] + b'{"step": 3, "x": 7}\n'
    for folder, suffixes in (("diagnostics", ["json"]), ("rollouts", ["jsonl", "safetensors"])):
        kept = [f"00000{step}.{suffix}" for step in (1, 2) for suffix in suffixes]
        assert sorted(p.name for p in (tmp_path / folder).iterdir()) == [*kept, "000009.txt"]


@pytest.mark.parametrize("samples, kept", [(2, 2), (0, 5), (9, 5)])
def test_rollouts_keep_the_configured_number_of_rows(tmp_path, samples, kept):
    Recorder(tmp_path, settings(samples=samples)).rollouts(10, [{"completion": str(i)} for i in range(5)])
    rows = [strict(line) for line in (tmp_path / "rollouts" / "000010.jsonl").read_text().splitlines()]
    assert [row["completion"] for row in rows] == ["0", "1", "2", "3", "4"][:kept]


def test_tensorboard_hides_the_steps_that_were_taken_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Recorder(tmp_path, settings(tensorboard=True)) as recorder:
        recorder.truncate(0)
        for step in (1, 2, 3):
            recorder.log(step, {"x": float(step), "bad": float("nan")})
    with Recorder(tmp_path, settings(tensorboard=True)) as recorder:
        recorder.truncate(1)
        recorder.log(2, {"x": 20.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("x")] == [(1, 1.0), (2, 20.0)]
    assert "bad" not in events.Tags()["scalars"]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_tracker_is_a_user_error_naming_the_package(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=f"logging.{name}: .*pip install {name}"):
        Recorder(tmp_path, settings(**{name: {"project": "p"}}))


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict]] = []
        self.failing = False
        self.finished = False

    def log(self, metrics: dict, step: int) -> None:
        if self.failing:
            raise ConnectionError("gone\naway")
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def tracker(monkeypatch, request):
    module, run, starts = ModuleType(request.param), FakeRun(), []
    module.init = lambda **arguments: starts.append(arguments) or run
    monkeypatch.setitem(sys.modules, request.param, module)
    return SimpleNamespace(name=request.param, run=run, starts=starts)


both = pytest.mark.parametrize("tracker", ["wandb", "trackio"], indirect=True)


@both
def test_trackers_get_finite_metrics_and_the_configuration(tmp_path, tracker):
    with Recorder(tmp_path / "demo", settings(**{tracker.name: {"project": "p"}}), config={"seed": 3}) as recorder:
        recorder.log(1, {"x": 1.0, "y": float("nan")})
    start = tracker.starts[0]
    assert (start["project"], start["name"], start["config"]) == ("p", "demo", {"seed": 3})
    assert tracker.run.logged == [(1, {"x": 1.0})] and tracker.run.finished


@both
def test_a_tracker_that_fails_later_is_dropped_with_one_warning(tmp_path, tracker):
    warnings: list[str] = []
    recorder = Recorder(tmp_path, settings(**{tracker.name: {"project": "p"}}), warn=warnings.append)
    tracker.run.failing = True
    recorder.log(1, {"x": 1.0})
    recorder.log(2, {"x": 2.0})
    assert warnings == [f"logging.{tracker.name}: stopped for this run: gone away"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"], indirect=True)
def test_a_resumed_run_joins_the_same_run_of_the_tracker(tmp_path, tracker):
    for _ in range(2):
        Recorder(tmp_path, settings(**{tracker.name: {"project": "p"}})).close()
    first, second = tracker.starts
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert tracker.name == "wandb" or re.fullmatch("[0-9a-f]{21}", first["id"])


class FakeMlflow:
    """In-memory MLflow client, with the methods that a run calls."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict] = {}

    def get_experiment_by_name(self, name: str):
        found = self.experiments.get(name)
        return None if found is None else SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def create_run(self, experiment: str, run_name: str):
        run = f"run{len(self.runs)}"
        self.runs[run] = {"name": run_name, "experiment": experiment, "metrics": [], "status": None, "config": None}
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def log_dict(self, run: str, values: dict, file: str) -> None:
        self.runs[run]["config"] = values

    def update_run(self, run: str, status: str) -> None:
        self.runs[run]["status"] = status

    def log_batch(self, run: str, metrics: list) -> None:
        self.runs[run]["metrics"] += [(m.step, m.key, m.value) for m in metrics]

    def set_terminated(self, run: str) -> None:
        self.runs[run]["status"] = "FINISHED"


def test_mlflow_has_one_run_for_all_starts_of_a_run_directory(tmp_path, monkeypatch):
    client, module, uris = FakeMlflow(), ModuleType("mlflow"), []
    module.MlflowClient = lambda: client
    module.set_tracking_uri = uris.append
    module.entities = SimpleNamespace(
        Metric=lambda key, value, now, step: SimpleNamespace(key=key, value=value, step=step)
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    for step in (1, 2):
        own = settings(mlflow={"project": "p", "tracking_uri": "file:///tmp/runs"})
        with Recorder(tmp_path / "demo", own, config={"seed": 3}) as recorder:
            recorder.log(step, {"x": float(step), "y": float("nan")})
            assert client.runs["run0"]["status"] == "RUNNING"
    assert client.experiments == {"p": "0"} and set(uris) == {"file:///tmp/runs"}
    (run,) = client.runs.values()
    assert run["metrics"] == [(1, "x", 1.0), (2, "x", 2.0)]
    assert (run["name"], run["status"], run["config"]) == ("demo", "FINISHED", {"seed": 3})
