"""Train members, one or several concurrently, each in its own process so that peak memory is measured per member.

With several GPUs, a member that needs one gets the GPU with the fewest members. A member trains from a resolved copy of
its configuration, out/configs/NAME.yaml, so later edits of CONFIG have no effect. Its output goes to out/logs/NAME.log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qarl.comparison.plan import Member
from qarl.comparison.progress import ProgressView, last_record
from qarl.config import Config
from qarl.memory.host import expected_device
from qarl.storage.disk import atomic_write_text, disk_errors
from qarl.storage.lock import release_lock, take_lock
from qarl.storage.runs import METRICS
from qarl.utils.machine import visible_gpus
from qarl.utils.signals import Signals, signal_name

POLL_SECONDS = 0.2

_BOOT = (
    "import json, signal, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from qarl.utils.signals import signal_at_end_of_pipe; signal_at_end_of_pipe(int(sys.argv[2]), signal.SIGTERM); "
    "sys.argv[:] = ['qarl', *sys.argv[3:]]; from qarl.cli import main; main()"
)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Create and lock `out`.

    Raises:
        UserError: Another comparison uses it, or it cannot be created.
    """
    with disk_errors(out, place="--out"):
        out.mkdir(parents=True, exist_ok=True)
        lock = take_lock(out, "in use by another qarl compare; wait for it, or choose another --out")
        try:
            yield
        finally:
            release_lock(lock)


def write_configs(members: list[Member], out: Path) -> None:
    """Write the members' resolved configurations and create the log directory.

    Raises:
        UserError: A file cannot be written.
    """
    with disk_errors(out, place="--out"):
        for folder in ("configs", "logs"):
            (out / folder).mkdir(exist_ok=True)
        for member in members:
            if member.config is not None:
                atomic_write_text(_config_path(member, out), member.config.to_yaml())


def _config_path(member: Member, out: Path) -> Path:
    return out / "configs" / f"{member.name}.yaml"


def train_members(members: list[Member], out: Path, view: ProgressView, jobs: int = 1) -> int | None:
    """Train each waiting member, and set its state and reason.

    Ctrl-C and SIGTERM are forwarded to the training members, which save and stop; the others stay waiting.

    Args:
        members: Members of the comparison.
        out: Output directory.
        view: Shows progress.
        jobs: Number of members trained concurrently.

    Returns:
        The signal that interrupted training, or None.

    Raises:
        UserError: `out` cannot be written.
    """
    waiting, gpus = [member for member in members if member.state == "waiting"], visible_gpus()
    running: list[_Training] = []
    with Signals() as signals:
        while running or (waiting and not signals.received):
            while waiting and len(running) < jobs and not signals.received:
                member = waiting.pop(0)
                running.append(_begin(member, out, view, _gpu_for(member, gpus, running)))
            for training in list(running):
                if (code := training.follow(signals)) is not None:
                    running.remove(training)
                    training.conclude(code, bool(signals.received))
                    view.ended(training.member)
            if running:
                view.progress([training.member for training in running])
                time.sleep(POLL_SECONDS)
    return signals.received[0] if signals.received else None


@dataclass
class _Training:
    """A member in training.

    Attributes:
        process: Its process.
        log: Its log, which earlier starts may have written too.
        begin: Offset in bytes at which this start's output begins in the log.
        gpu: The GPU that it sees; None: all.
        passed: Number of signals forwarded to it.
    """

    member: Member
    process: TrainProcess
    log: Path
    begin: int
    gpu: str | None
    passed: int = 0

    def follow(self, signals: Signals) -> int | None:
        """Forward new signals; returns the exit code once the process has ended."""
        code = self.process.poll()
        if code is None:
            while self.passed < len(signals.received):
                self.process.send_signal(signals.received[self.passed])
                self.passed += 1
        return code

    def conclude(self, code: int, interrupted: bool) -> None:
        """Set the state for exit code `code`. A run is finished only if its last step is recorded."""
        member = self.member
        assert member.config is not None, "a member in training has a configuration"
        steps = member.config.train.steps
        step = (last_record(member.run_dir / METRICS) or {}).get("step", 0)
        if code == 0 and step < steps:
            member.state, member.reason = "failed", f"ended with exit code 0 after step {step} of {steps}"
        elif code == 0:
            member.state = "finished"
        elif interrupted:
            member.state, member.reason = "stopped", "interrupted; rerun the same command to resume"
        else:
            member.state, member.reason = "failed", failure(code, self.log, self.begin)


def _gpu_for(member: Member, gpus: list[str], running: list[_Training]) -> str | None:
    """Return the GPU with the fewest members; None (all GPUs) if there is at most one or the member needs several."""
    assert member.config is not None, "a member in training has a configuration"
    if len(gpus) < 2 or not _fits_one_gpu(member.config):
        return None
    return min(gpus, key=lambda gpu: sum(other.gpu == gpu for other in running))


def _fits_one_gpu(config: Config) -> bool:
    rollout, vllm = config.rollout, config.rollout.vllm
    more = rollout.engine == "vllm" and (vllm.device is not None or vllm.tensor_parallel > 1)
    more = more or rollout.samples_ahead
    return expected_device(config) == "cuda" and not more


def _begin(member: Member, out: Path, view: ProgressView, gpu: str | None) -> _Training:
    path = out / "logs" / f"{member.name}.log"
    with disk_errors(path, place="--out"):
        log = open(path, "ab")  # noqa: SIM115 - closed below
    with log:
        begin = os.fstat(log.fileno()).st_size
        member.state = "running"
        view.started(member)
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        process = TrainProcess(["train", str(_config_path(member, out))], log, visible)
        return _Training(member, process, path, begin, gpu)


class TrainProcess:
    """`qarl` in its own session, because this process forwards the terminal's Ctrl-C. Ends with this process."""

    def __init__(self, argv: list[str], log: BinaryIO, environment: Mapping[str, str]) -> None:
        # Nothing is written. The kernel closes this end of the pipe when this process ends for any reason.
        read, self._lifeline = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(read), *argv],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[read],
            start_new_session=True,
        )
        os.close(read)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs. Not called again afterwards."""
        code = self._process.poll()
        if code is not None:
            os.close(self._lifeline)
        return code

    def send_signal(self, signum: int) -> None:
        self._process.send_signal(signum)


def failure(code: int, log: Path, begin: int = 0) -> str:
    """Explain an exit code in one line: the last `error:` of the log, else its last line."""
    how = f"ended by {signal_name(-code)}" if code < 0 else f"exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    with open(log, "rb") as file:
        file.seek(max(begin, os.fstat(file.fileno()).st_size - 2**16))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    detail = f": {lines[-1].strip()}" if lines else ""
    return f"{how}{hint}{detail}"
