"""The learner's handle of the sampler's process: start, orders, signs of life, the end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qarl.distributed.place import alone
from qarl.rollout.vllm.messages import (
    data_limit,
    order,
    read_done,
    read_failed,
    read_progress,
    read_ready,
    start_order,
)
from qarl.rollout.vllm.settings import ENVIRONMENT, SamplerSettings, vllm_environment
from qarl.rollout.vllm.wire import Channel, Message, WireError, WireTimeout, channel_pair
from qarl.storage.disk import disk_errors
from qarl.weight_sync.connection import SamplerFault
from qarl.weight_sync.fingerprints import Fingerprint
from qarl.weight_sync.transport import ReceiverPlan
from qarl.weight_sync.verify import PublishError

TICK_S = 0.1  # between two looks at a busy sampler
ABORT_LIMIT_S = 30.0  # for an engine step that is under way when the user interrupts

Tick = Callable[[int, int], None]


class BegunProcess:
    """A sampler's process from its beginning: it imports vLLM and waits for the order to start.

    numerics, threads: see `SamplerSettings`. plan, log: see `SamplerProcess`.
    Raises UserError where the log cannot be written.
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
        """End it, if nobody has taken it over."""
        _end(self.process, self.channel)


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    channel.close()


class SamplerProcess:
    """A vLLM in a process of its own, which leads a session: the terminal's Ctrl-C does not reach it.

    log: gets what vLLM prints. timeout_s: without a sign of life for so long it counts as hung. plan: of
    the transport that publications come by. begun: with this plan; None: it begins now.
    progress: responses and tokens of the order under way.
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
        self.capabilities: dict[str, Any] = {}
        if begun is None:
            begun = BegunProcess(settings.numerics, settings.threads, plan, log)
        self._process, self._channel = begun.process, begun.channel
        self._start = start_order(settings, expected, plan)
        self._order: tuple[str, Any] = ("start", None)
        self.progress = (0, 0)
        self.result: Any = None
        self._deadline, self._received = math.inf, 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, tick: Tick) -> None:
        """Wait until vLLM is ready. tick(0, 0): called meanwhile. Raises SamplerFault, PublishError."""
        self.begin_start()
        self.capabilities = self._answer(tick)

    def begin_start(self) -> None:
        """The order that every other follows."""
        self._send(self._start)

    def call(self, operation: str, payload: Any, tick: Tick) -> Any:
        """Give an order and wait for its result. tick(responses, tokens): called meanwhile; what it raises aborts.

        Raises SamplerFault: it died, hung (and was killed), or failed. PublishError: see `Host.publish`.
        """
        self.begin(operation, payload)
        return self.finish(tick)

    def begin(self, operation: str, payload: Any) -> None:
        """Give an order; `finish` waits for its result."""
        self._order = (operation, payload)
        self._send(order(operation, payload))

    def finish(self, tick: Tick) -> Any:
        try:
            return self._answer(tick)
        except (SamplerFault, PublishError):
            raise
        except KeyboardInterrupt:  # a second Ctrl-C, which waits for nothing
            self.close()
            raise
        except BaseException:  # the user's interrupt: the sampler must be usable afterwards
            self._abort()
            raise

    def close(self) -> None:
        """End it. It holds nothing that must be kept."""
        _end(self._process, self._channel)

    def _send(self, message: Message) -> None:
        if self._channel.closed:  # by `_abort` or `finish`
            raise SamplerFault("it was ended with what was interrupted")
        try:
            self._channel.send(message, self.timeout_s)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error
        except WireTimeout:
            raise self._hung() from None
        except WireError as error:  # an interrupt cut an order off, and the sampler waits for the rest of it
            raise self._ended(str(error)) from None

    def expect(self) -> None:
        """Be ready to hear the answer to the last order."""
        self._channel.data_limit = data_limit(*self._order)
        self._deadline, self._received = time.monotonic() + self.timeout_s, self._channel.received
        self.progress, self.result = (0, 0), None

    def hear(self, seconds: float) -> bool:
        """Listen for at most so long; returns whether the answer is there, as `result`. `progress`: what came of it.

        Raises SamplerFault, PublishError.
        """
        operation, payload = self._order
        try:
            ended = self._process.poll() is not None  # before listening: what it said last is heard in any case
            message = self._channel.poll(seconds)
            if self._channel.received != self._received:
                self._deadline, self._received = time.monotonic() + self.timeout_s, self._channel.received
            if message is not None:
                match message.kind:
                    case "ready":
                        self.result = read_ready(message)
                        return True
                    case "done":
                        self.result = read_done(operation, payload, message)
                        return True
                    case "aborted":
                        return True
                    case "failed":
                        failure = read_failed(message)
                        raise PublishError(failure.message) if failure.publish else SamplerFault(failure.message)
                    case "progress":
                        self.progress = read_progress(message)
                    case other:
                        raise WireError(f"an answer {other[:40]!r}")
            elif ended:
                raise self._died()
            elif time.monotonic() > self._deadline:
                raise self._hung()
        except EOFError as error:
            raise self._died() from error
        except WireError as error:
            raise self._ended(f"it sent what is no answer: {error}") from None
        return False

    def _answer(self, tick: Tick) -> Any:
        self.expect()
        while not self.hear(TICK_S):
            tick(*self.progress)
        return self.result

    def _abort(self) -> None:
        """Let it forget the operation under way; it is ended if it does not within a while."""
        with suppress(SamplerFault, PublishError):
            self._send(Message("abort"))
            limit, self.timeout_s = self.timeout_s, ABORT_LIMIT_S
            try:
                self._answer(lambda responses, tokens: None)
            finally:
                self.timeout_s = limit

    def _hung(self) -> SamplerFault:
        return self._ended(f"it gave no sign of life for {self.timeout_s:g} s (rollout.vllm.timeout_s)")

    def _ended(self, why: str) -> SamplerFault:
        """It cannot be talked to any more: end it."""
        self.close()
        return SamplerFault(why)

    def _died(self) -> SamplerFault:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return self._ended("it closed its connection")
        return ended_with(code)


def ended_with(code: int) -> SamplerFault:
    """The fault of a sampler's process that ended by itself. code: `Popen.returncode`."""
    if code >= 0:
        return SamplerFault(f"its process ended with exit code {code}")
    hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
    return SamplerFault(f"its process was ended by {signal.Signals(-code).name}{hint}")


def sampler_environment(environment: Mapping[str, str], plan: ReceiverPlan) -> dict[str, str]:
    """What a sampler's process gets of the learner's environment: the plan's GPUs, and nothing of other ranks.

    vLLM would take a launcher's ranks for its own. The network interface that ranks reach each other by is not for the
    sampler, which talks to nobody. Nor is its compiled code for others: vLLMs that start at the same time would read
    what another one is writing.
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
