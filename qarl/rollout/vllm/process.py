"""The learner's handle of the sampler's process: start, orders, signs of life, the end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qarl.distributed.place import alone
from qarl.rollout.vllm.channel import ChannelError, channel_pair
from qarl.rollout.vllm.settings import ENVIRONMENT, SamplerSettings, vllm_environment
from qarl.storage.disk import disk_errors
from qarl.text import visible
from qarl.weight_sync.connection import SamplerFault
from qarl.weight_sync.fingerprints import Fingerprint
from qarl.weight_sync.transport import ReceiverPlan
from qarl.weight_sync.verify import PublishError

TICK_S = 0.1  # between two polls of a busy sampler
ABORT_LIMIT_S = 30.0  # for the engine step that runs when the user interrupts

Tick = Callable[[int, int], None]


class Sampler(ABC):
    """A started vLLM, as the learner sees it.

    Methods raise SamplerFault if vLLM died, hung (and was killed) or failed, and PublishError as `Host.publish` does.

    Attributes:
        capabilities: See `Host.capabilities`.
    """

    capabilities: dict[str, Any]

    @abstractmethod
    def start(self, tick: Tick) -> None:
        """Wait until vLLM is ready, calling tick(0, 0)."""

    def call(self, operation: str, payload: Any, tick: Tick) -> Any:
        """Send an order and wait for its result; see `worker.perform`."""
        self.begin(operation, payload)
        return self.finish(tick)

    @abstractmethod
    def begin(self, operation: str, payload: Any) -> None:
        """Send an order."""

    @abstractmethod
    def finish(self, tick: Tick) -> Any:
        """Wait for the result of the order, calling tick(responses, tokens). An exception from it aborts the order."""

    @abstractmethod
    def close(self) -> None:
        """End vLLM, which holds no state that must be kept."""


class BegunProcess:
    """A sampler's process that imports vLLM and waits for the start order.

    numerics, threads: See `SamplerSettings`. plan, log: See `SamplerProcess`. Raises UserError if the log cannot be
    written.
    """

    def __init__(self, numerics: str, threads: int | None, plan: ReceiverPlan, log: Path) -> None:
        self.channel, child = channel_pair()
        environment = sampler_environment(os.environ, plan)
        environment |= vllm_environment(environment, numerics, threads)
        told = str(child.fileno()), numerics, str(time.monotonic()), str(os.getpid())
        with disk_errors(log):
            output = log.open("ab")
        with output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "qarl.rollout.vllm.child", *told],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(child.fileno(), *plan.fds),
                start_new_session=True,
                env=environment,
            )
        child.close()

    def close(self) -> None:
        """Kill the process; it holds no state that must be kept."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()


class SamplerProcess(Sampler):
    """A vLLM in a process with its own session, so the terminal's Ctrl-C does not reach it.

    Args:
        expected: Fingerprints of the snapshot in the checkpoint, by published name.
        plan: How the process opens the transport of publishes.
        log: File for vLLM's output.
        timeout_s: Seconds without a sign of life after which it counts as hung.
        begun: A process begun with this plan; None: start one.

    Attributes:
        progress: Responses and tokens of the current order.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        expected: Mapping[str, Fingerprint],
        plan: ReceiverPlan,
        log: Path,
        timeout_s: float,
        begun: BegunProcess | None = None,
    ) -> None:
        self.timeout_s, self.log = timeout_s, log
        self._begun = begun or BegunProcess(settings.numerics, settings.threads, plan, log)
        self._process, self._channel = self._begun.process, self._begun.channel
        self._start_order = settings, dict(expected), plan
        self.progress = (0, 0)
        self.result: Any = None
        self._deadline, self._received = math.inf, 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, tick: Tick) -> None:
        self.begin_start()
        self.capabilities = self._answer(tick)

    def begin_start(self) -> None:
        """Send the start order, which precedes all others."""
        self.begin("start", self._start_order)

    def begin(self, operation: str, payload: Any) -> None:
        if self._channel.closed:  # by `_abort` or `finish`
            raise SamplerFault("it was ended with the interrupted order")
        try:
            self._channel.send(operation, payload, self.timeout_s)
        except TimeoutError:
            raise self._hung() from None
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error
        except ChannelError as error:  # an interrupt cut an order off, and the sampler waits for its rest
            raise self._ended(str(error)) from None

    def finish(self, tick: Tick) -> Any:
        try:
            return self._answer(tick)
        except (SamplerFault, PublishError):
            raise
        except KeyboardInterrupt:  # a second Ctrl-C: do not wait
            self.close()
            raise
        except BaseException:  # the user's interrupt: the sampler must be usable afterwards
            self._abort()
            raise

    def close(self) -> None:
        self._begun.close()

    def expect(self) -> None:
        """Prepare for the answer to the last order."""
        self._deadline, self._received = time.monotonic() + self.timeout_s, self._channel.received
        self.progress, self.result = (0, 0), None

    def hear(self, seconds: float) -> bool:
        """Wait up to `seconds` for the answer; returns whether it has arrived in `result`, and updates `progress`.

        Raises SamplerFault, PublishError.
        """
        try:
            ended = self._process.poll() is not None  # before reading, so that its last message is read in any case
            message = self._channel.poll(seconds)
            if self._channel.received != self._received:
                self._deadline, self._received = time.monotonic() + self.timeout_s, self._channel.received
        except EOFError as error:
            raise self._died() from error
        except ChannelError as error:
            raise self._ended(f"it sent an invalid answer: {error}") from None
        match message:
            case None if ended:
                raise self._died()
            case None if time.monotonic() > self._deadline:
                raise self._hung()
            case None:
                return False
            case "progress", progress:
                self.progress = progress
                return False
            case "done", result:
                self.result = result
                return True
            case "aborted", _:
                return True
            case "failed", (text, refused):
                raise (PublishError if refused else SamplerFault)(visible(text, keep_newlines=True))
        raise self._ended(f"it sent an invalid answer: {str(message[0])[:40]!r}")

    def _answer(self, tick: Tick) -> Any:
        self.expect()
        while not self.hear(TICK_S):
            tick(*self.progress)
        return self.result

    def _abort(self) -> None:
        """Abort the current operation; kill the process if it does not answer within a while."""
        with suppress(SamplerFault, PublishError):
            self.begin("abort", None)
            limit, self.timeout_s = self.timeout_s, ABORT_LIMIT_S
            try:
                self._answer(lambda responses, tokens: None)
            finally:
                self.timeout_s = limit

    def _hung(self) -> SamplerFault:
        return self._ended(f"it gave no sign of life for {self.timeout_s:g} s (rollout.vllm.timeout_s)")

    def _ended(self, why: str) -> SamplerFault:
        """Kill a process that no longer answers."""
        self.close()
        return SamplerFault(why)

    def _died(self) -> SamplerFault:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return self._ended("it closed its connection")
        return ended_with(code)


def ended_with(code: int) -> SamplerFault:
    """The fault of a process that ended by itself. code: `Popen.returncode`."""
    if code >= 0:
        return SamplerFault(f"its process ended with exit code {code}")
    hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
    return SamplerFault(f"its process was ended by {signal.Signals(-code).name}{hint}")


def sampler_environment(environment: Mapping[str, str], plan: ReceiverPlan) -> dict[str, str]:
    """The learner's environment for a sampler's process: with the plan's GPUs, without the variables of a launcher.

    vLLM would take a launcher's ranks for its own. The sampler communicates with no other machine, so it does not get
    the ranks' network interface. Each rank has its own cache of compiled code: vLLMs that start at the same time would
    read what another one is writing.
    """
    own = alone(environment)
    if len(own) < len(environment):
        own |= {name: ENVIRONMENT[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    if (local := environment.get("LOCAL_RANK", "0")) != "0":
        user = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        own["VLLM_CACHE_ROOT"] = str(Path(environment.get("VLLM_CACHE_ROOT") or Path(user, "vllm"), f"rank-{local}"))
    if plan.gpus:
        visible = own.get("CUDA_VISIBLE_DEVICES")
        names = [visible.split(",")[gpu] if visible else str(gpu) for gpu in plan.gpus]
        own["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return own | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
