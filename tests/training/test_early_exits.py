"""Code that a run calls ends the process early: the exit code says so, and no finished step is lost."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import Finished, Qarl, settings, write_config

from qarl.config.logging import LoggingConfig
from qarl.errors import UserError
from qarl.objectives import custom
from qarl.training import trackers
from qarl.training.loop import early_ends
from qarl.training.recorder import Recorder
from qarl.utils.signals import Interrupted, StoppedAtOnce

pytestmark = pytest.mark.slow

STEPS = 4
# EARLY in the environment: place, call (counted from 1, in one process), and the statement that runs there.
OWN = '''
import asyncio, os, sys
from pathlib import Path

CALLS = {}


class Own(BaseException):
    pass


def early(place):
    CALLS[place] = CALLS.get(place, 0) + 1
    where, call, statement = os.environ.get("EARLY", "nowhere 0 pass").split(maxsplit=2)
    if where == place and int(call) == CALLS[place]:
        exec(statement, globals())


def recurse():
    recurse()


class Objective:
    def __init__(self):
        early("objective-build")

    def __call__(self, inputs):
        import torch  # here, because the reward's worker needs none

        from qarl.objectives import Surrogate

        early("objective-call")
        ratio = torch.exp(inputs.logps.logp - inputs.logps.logp_old)
        return Surrogate(ratio * inputs.token_advantages, {})


def reward(completions, **columns):
    return [len(text) % 7 / 7 for text in completions]


class Tracker:
    """As trackio and its run."""

    def init(self, **options):
        early("tracker-init")
        return self

    def log(self, metrics, step):
        early("tracker-log")

    def finish(self):
        early("tracker-close")
'''
KINDS = (
    *("sys.exit(0)", "sys.exit()", "sys.exit(3)", "sys.exit('bye')", "raise KeyboardInterrupt", "raise GeneratorExit"),
    *("raise Own", "raise Own('two\\nlines')", "raise asyncio.CancelledError", "raise MemoryError", "recurse()"),
    *("raise StopIteration", "raise ValueError('odd')", "exit(0)", "next(iter(()))"),
)


class Place:
    """A folder with the code that ends early, and its runs."""

    def __init__(self, qarl: Qarl, model: Path, folder: Path) -> None:
        self.qarl, self.folder = qarl, folder
        (folder / "own.py").write_text(OWN)
        data = settings(
            model,
            objective={"name": "custom", "path": "own.py:Objective", "aggregation": "token-mean"},
            reward={"functions": [{"name": "own.py:reward"}], "workers": 1},
            rollout={"n": 2, "max_response_length": 4},
            train={"steps": STEPS, "prompts_per_step": 2, "minibatch_size": 4},
            logging={"tensorboard": False, "trackio": {"project": "p"}, "samples": 0},
        )
        write_config(folder / "c.yaml", data)

    def train(self, run: Path, early: str, *overrides: str) -> Finished:
        module = "import sys; sys.path.insert(0, '.')\nsys.modules['trackio'] = __import__('own').Tracker()"
        before = f"import os; os.environ['EARLY'] = 'nowhere 0 pass'\n{module}\nos.environ['EARLY'] = {early!r}"
        before += "\n__import__('own').CALLS.clear()"
        return self.qarl.run("train", "c.yaml", f"train.run_dir={run}", *overrides, before=before, cwd=self.folder)


@pytest.fixture(scope="module")
def place(qarl, tiny_model, tmp_path_factory) -> Place:
    return Place(qarl, tiny_model("llama"), tmp_path_factory.mktemp("early"))


def test_metrics_that_lack_the_last_step_are_no_success(place):
    """Exit code 0 says that the last step is recorded, whatever happened to the file."""
    run = place.folder / "cut"
    done = place.train(run, f"tracker-close 1 open({str(run / 'metrics.jsonl')!r}, 'w').close()")
    assert done.code == 2 and done.err.startswith(f"error: {run}/metrics.jsonl: ends with step 0, not with train.steps")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_exception_is_one_line_of_the_code_that_raised_it(kind, tmp_path, monkeypatch):
    """At each place where a run calls code of the user in its own process; signals pass."""
    own: dict[str, Any] = {"__name__": "own"}
    exec(OWN, own)
    monkeypatch.setattr(custom, "find", lambda reference: own["Objective"])
    monkeypatch.setattr(custom, "check_reference", lambda *arguments: None)
    expected: Any = KeyboardInterrupt if "KeyboardInterrupt" in kind else UserError
    memory: Any = MemoryError if "MemoryError" in kind else expected

    def raised(place: str, error: Any, work: Callable[[], Any]) -> None:
        own["CALLS"].clear()
        with monkeypatch.context() as patch, pytest.raises(error) as caught:
            patch.setenv("EARLY", f"{place} 1 {kind}")
            work()
        assert "\n" not in str(caught.value)

    raised("objective-build", expected, custom.Custom(name="custom", path="own:Objective").bind)
    surrogate = custom.Custom(name="custom", path="own:Objective").bind()
    raised("objective-call", memory, lambda: surrogate(None))
    raised("tracker-init", expected, lambda: trackers._start("trackio", own["Tracker"]().init))
    said: list[str] = []
    recorder = Recorder(tmp_path, LoggingConfig(tensorboard=False), warn=said.append)
    recorder._trackers = [SimpleNamespace(name="own", log=lambda step, metrics: own["Tracker"]().log(metrics, step))]
    if expected is UserError:
        monkeypatch.setenv("EARLY", f"tracker-log 1 {kind}")
        own["CALLS"].clear()
        recorder.log(1, {"a": 1.0})
        assert len(said) == 1 and said[0].startswith("logging.own: stopped for this run: ")
    else:
        raised("tracker-log", expected, lambda: recorder.log(1, {"a": 1.0}))
    assert recorder.step == 1


@pytest.mark.parametrize(
    "error", [SystemExit(0), SystemExit(), GeneratorExit(), KeyboardInterrupt(), BaseException("x")]
)
def test_what_no_place_catches_is_no_silent_end_of_a_run(error):
    with pytest.raises(UserError, match="code that the run calls raised"), early_ends():
        raise error


@pytest.mark.parametrize("error", [Interrupted(1), StoppedAtOnce(), ValueError("x"), UserError("y")])
def test_signals_and_ordinary_exceptions_pass(error):
    with pytest.raises(type(error)), early_ends():
        raise error
