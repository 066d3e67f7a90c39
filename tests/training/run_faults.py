"""Python code for `tiny_runs.Qarl.run(before=...)` that kills a run or its sampler; and a run's repeatable metrics."""

import json
from pathlib import Path
from typing import Any

MEASURED = ("time/", "memory/", "throughput/")  # differ from run to run
BY_ENGINE = (*MEASURED, "async/", "publish/")  # also differ between kinds of samplers

ASYNC = "qarl.rollout.asynchronous.engine:AsyncEngine"
GIVEN = "qarl.training.local_engine:GivenResponses"

_KILL_AT_TAKE = """
def install():
    import os, signal
    from {module} import {engine}
    real, takes = {engine}.take, []
    def take(self, *arguments):
        takes.append(1)
        if {when}:
            os.kill({pid}, signal.{name})
        return real(self, *arguments)
    {engine}.take = take
install()
"""
_KILL_RUN = """
def install():
    import os, signal
    from qarl.training.recorder import Recorder
    real = Recorder.log
    def log(self, step, metrics):
        real(self, step, metrics)
        if step == {step}:
            os.kill(os.getpid(), signal.SIGKILL)
    Recorder.log = log
install()
"""
_KILL_SAMPLER_AT_PUBLISH = """
def install():
    import os, signal, threading, time
    from qarl.rollout.asynchronous.connection import SamplerConnection
    from qarl.weight_sync.transport import MemoryFileTransport
    pack = MemoryFileTransport.pack
    def packed(self, tensors):
        payload = pack(self, tensors)
        if threading.current_thread().name == "qarl-sampler":
            time.sleep(1.0)  # the learner publishes meanwhile
        return payload
    MemoryFileTransport.pack = packed
    real, waits = SamplerConnection.wait_for_answers, []
    def wait_for_answers(self):
        real(self)
        waits.append(1)
        if len(waits) == {publish}:
            os.kill(self.process.pid, signal.SIGKILL)
            while self._unanswered is None:
                time.sleep(0.001)
    SamplerConnection.wait_for_answers = wait_for_answers
install()
"""


def kill_sampler(take: int | None) -> str:
    """Kill the sampler's process when a step takes responses for the `take`-th time. None: every time."""
    return _kill_at_take(f"len(takes) == {take}" if take else "True", "self._connection.process.pid", ASYNC)


def kill_sampler_at_publish(publish: int) -> str:
    """Kill the sampler before the `publish`-th publish, which then happens while a new sampler gets its weights."""
    return _KILL_SAMPLER_AT_PUBLISH.format(publish=publish)


def kill_at_take(take: int, engine: str = ASYNC) -> str:
    """Kill the run itself when a step takes responses for the `take`-th time. engine: ASYNC or GIVEN."""
    return _kill_at_take(f"len(takes) == {take}", "os.getpid()", engine)


def stop_at_take(take: int) -> str:
    """Send SIGTERM to the run itself when a step takes responses for the `take`-th time."""
    return _kill_at_take(f"len(takes) == {take}", "os.getpid()", ASYNC, "SIGTERM")


def _kill_at_take(when: str, pid: str, engine: str, name: str = "SIGKILL") -> str:
    module, _, of = engine.partition(":")
    return _KILL_AT_TAKE.format(when=when, pid=pid, module=module, engine=of, name=name)


def kill_run(step: int) -> str:
    """Kill the run itself after the metrics of a step are recorded."""
    return _KILL_RUN.format(step=step)


def on_rank(rank: int, code: str) -> str:
    """Run `code` on one rank only."""
    return f"import os\nif os.environ.get('RANK') == '{rank}':\n" + "".join(f"    {x}\n" for x in code.splitlines())


def recorded(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of every step of a run directory."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def repeatable(run: Path, measured: tuple[str, ...] = MEASURED) -> list[dict[str, Any]]:
    """Return the metrics of every step without those that differ when the run is repeated."""
    return [{key: value for key, value in row.items() if not key.startswith(measured)} for row in recorded(run)]
