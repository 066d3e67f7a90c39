"""Code that a run calls ends the process early: the exit code says so, and no finished step is lost."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from qarl.config.logging import LoggingConfig
from qarl.errors import UserError
from qarl.objectives import custom
from qarl.training import trackers
from qarl.training.loop import early_ends
from qarl.training.recorder import Recorder
from qarl.utils.signals import Interrupted, StoppedAtOnce

# EARLY in the environment: place and the statement that runs there.
OWN = '''
import os, sys


class Own(BaseException):
    pass


def early(place):
    where, statement = os.environ.get("EARLY", "nowhere pass").split(maxsplit=1)
    if where == place:
        exec(statement, globals())


class Objective:
    def __init__(self):
        early("objective-build")

    def __call__(self, inputs):
        import torch  # here, because the reward's worker needs none

        from qarl.objectives import Surrogate

        early("objective-call")
        ratio = torch.exp(inputs.logps.logp - inputs.logps.logp_old)
        return Surrogate(ratio * inputs.token_advantages, {})


class Tracker:
    """As trackio and its run."""

    def init(self, **options):
        early("tracker-init")
        return self

    def log(self, metrics, step):
        early("tracker-log")
'''
KINDS = (
    *("sys.exit(0)", "sys.exit('bye')", "raise KeyboardInterrupt", "raise GeneratorExit", "raise Own('two\\nlines')"),
    *("raise MemoryError", "raise StopIteration", "raise ValueError('odd')"),
)


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
        with monkeypatch.context() as patch, pytest.raises(error) as caught:
            patch.setenv("EARLY", f"{place} {kind}")
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
        monkeypatch.setenv("EARLY", f"tracker-log {kind}")
        recorder.log(1, {"a": 1.0})
        assert len(said) == 1 and said[0].startswith("logging.own: stopped for this run: ")
    else:
        raised("tracker-log", expected, lambda: recorder.log(1, {"a": 1.0}))
    assert recorder.step == 1


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), KeyboardInterrupt(), BaseException("x")])
def test_what_no_place_catches_is_no_silent_end_of_a_run(error):
    with pytest.raises(UserError, match="code that the run calls raised"), early_ends():
        raise error


@pytest.mark.parametrize("error", [Interrupted(1), StoppedAtOnce(), ValueError("x"), UserError("y")])
def test_signals_and_ordinary_exceptions_pass(error):
    with pytest.raises(type(error)), early_ends():
        raise error
