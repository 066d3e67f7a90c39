"""The learner's handle of the sampler's process: starts it, sends orders, detects hangs, ends it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from qarl.distributed.rank_info import child_environment
from qarl.errors import UserError
from qarl.rollout.engine import Progress
from qarl.rollout.vllm.channel import Channel, ChannelError, channel_pair
from qarl.rollout.vllm.settings import ENVIRONMENT, SamplerSettings, vllm_environment
from qarl.storage.disk import disk_errors
from qarl.utils.signals import signal_name
from qarl.utils.text import visible
from qarl.weight_sync.fingerprints import Fingerprint, PublishError
from qarl.weight_sync.sender import Connection, SamplerFault
from qarl.weight_sync.transport import ReceiverPlan, open_transport

TICK_S = 0.1  # seconds between two polls of a busy sampler
ABORT_LIMIT_S = 30.0  # seconds to wait for the current engine step when the user interrupts
MEMORY_HINT = " (rollout.vllm.memory_frac, rollout.kv_cache_tokens and model.max_length determine its memory)"


class SamplerError(UserError):
    """The sampler failed and is not restarted."""


class Sampler(Connection):
    """The learner's handle of a vLLM. The constructor starts its processes, which import vLLM; `start` loads the model.

    Methods raise SamplerFault if vLLM died, failed, or hung and was killed, and PublishError if `Host.publish` did.
    """

    @abstractmethod
    def start(self, settings: SamplerSettings, expected: Mapping[str, Fingerprint], tick: Progress) -> None:
        """Start vLLM and wait until it is ready, calling tick(0, 0).

        expected: Fingerprints of the snapshot in the checkpoint, by published name.
        """

    def call(self, operation: str, payload: Any, tick: Progress) -> Any:
        """Send an order and wait for its result; see `Host.execute`."""
        self.begin(operation, payload)
        return self.finish(tick)

    @abstractmethod
    def close(self) -> None:
        """Kill vLLM, which has no state that must be kept, and close the transports."""

    def raise_if_ended(self) -> None:
        """Raise SamplerError if a process of this sampler ended before `start`."""


class SamplerProcess(Sampler):
    """A sampler in its own process and session, so that Ctrl-C in the terminal does not reach it.

    Args:
        learner: The learner's device.
        gpu: CUDA index of the sampler's GPU; None for the learner's GPU or the CPU.
        numerics: `exact` or `fast`, see `SamplerSettings`; `native`: the native engine samples.
        log: File for the output of the process.
        timeout_s: A busy process that sends nothing for this many seconds counts as hung.

    Raises:
        UserError: The log cannot be written.

    Attributes:
        progress: (finished responses, tokens) of the current order.
        result: Answer to the last order.
        timeout_key: Configuration key of `timeout_s`.
    """

    timeout_key = "rollout.vllm.timeout_s"

    def __init__(self, learner: torch.device, gpu: int | None, numerics: str, log: Path, timeout_s: float) -> None:
        self.timeout_s, self.log = timeout_s, log
        self.progress = (0, 0)
        self.result: Any = None
        self._deadline, self._received = math.inf, 0
        self._closed = False
        transport = open_transport(learner, gpu)
        self.transports, self._plan = [transport], transport.plan
        try:
            # As many threads as the learner, because only one of them computes at a time.
            threads = torch.get_num_threads() if learner.type == "cpu" else None
            self._process, self._channel = self._spawn(numerics, threads)
        except BaseException:
            transport.close()
            raise

    def _spawn(self, numerics: str, threads: int | None) -> tuple[subprocess.Popen[bytes], Channel]:
        """Start the process. threads: Number of CPU threads; None: vLLM's default."""
        channel, child = channel_pair()
        environment = sampler_environment(os.environ, self._plan)
        environment |= vllm_environment(environment, numerics, threads)
        arguments = str(child.fileno()), numerics, str(time.monotonic()), str(os.getpid())
        with disk_errors(self.log):
            output = self.log.open("ab")
        with output, child:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "qarl.rollout.child", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(child.fileno(), *self._plan.fds),
                start_new_session=True,
                env=environment,
            )
        return process, channel

    @property
    def pid(self) -> int:
        return self._process.pid

    def raise_if_ended(self) -> None:
        if (code := self._process.poll()) is not None:
            raise start_error(_ended_with(code), self.log)

    def start(self, settings: SamplerSettings, expected: Mapping[str, Fingerprint], tick: Progress) -> None:
        self.begin_start(settings, expected)
        self.capabilities = self._answer(tick)

    def begin_start(self, settings: SamplerSettings, expected: Mapping[str, Fingerprint]) -> None:
        """Send the start order, which precedes all others."""
        self.begin("start", (settings, dict(expected), self._plan))

    def begin(self, operation: str, payload: Any) -> None:
        if self._closed:  # by `_abort` or `finish`
            raise SamplerFault("its process was killed because an order was interrupted")
        try:
            self._channel.send(operation, payload, self.timeout_s)
        except TimeoutError:
            raise self._hung() from None
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error
        except ChannelError as error:  # an interrupt cut off an order, and the sampler still waits for the rest of it
            raise self._ended(str(error)) from None

    def finish(self, tick: Progress) -> Any:
        try:
            return self._answer(tick)
        except (SamplerFault, PublishError):
            raise
        except KeyboardInterrupt:  # a second Ctrl-C: do not wait for the sampler
            self.close()
            raise
        except BaseException:  # the user's interrupt: keep the sampler usable
            self._abort()
            raise

    def close(self) -> None:
        if self._closed:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()
        self.transports[0].close()
        self._closed = True

    def expect_answer(self) -> None:
        """Reset the deadline, the progress and the result for the answer to the last order."""
        self._deadline, self._received = time.monotonic() + self.timeout_s, self._channel.received
        self.progress, self.result = (0, 0), None

    def poll(self, seconds: float) -> bool:
        """Wait up to `seconds` for the answer to the current order, and update `progress`.

        Returns whether the answer has arrived, in `result`. Raises as `message`.
        """
        match self.message(seconds):
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
            case kind, _:
                raise self._ended(f"it sent an invalid answer: {str(kind)[:40]!r}")
        raise AssertionError("a message is a pair")

    def message(self, seconds: float) -> tuple[str, Any] | None:
        """Wait up to `seconds` for a message; None if there is none.

        Raises:
            SamplerFault: The process died, hangs, sent invalid bytes, or reported a failure.
            PublishError: The process rejected a publish.
        """
        try:
            ended = self._process.poll() is not None  # before the read, so that its last message is not lost
            message = self._channel.poll(seconds)
            if self._channel.received != self._received:
                self._deadline, self._received = time.monotonic() + self.timeout_s, self._channel.received
        except EOFError as error:
            raise self._died() from error
        except ChannelError as error:
            raise self._ended(f"it sent an invalid answer: {error}") from None
        if message is None and ended:
            raise self._died()
        if message is None and time.monotonic() > self._deadline:
            raise self._hung()
        if message is not None and message[0] == "failed":
            text, refused = message[1]
            raise (PublishError if refused else SamplerFault)(visible(text, keep_newlines=True))
        return message

    def _answer(self, tick: Progress) -> Any:
        self.expect_answer()
        while not self.poll(TICK_S):
            tick(*self.progress)
        return self.result

    def _abort(self) -> None:
        """Abort the current order; kill the process if it does not answer within `ABORT_LIMIT_S`."""
        with suppress(SamplerFault, PublishError):
            self.begin("abort", None)
            limit, self.timeout_s = self.timeout_s, ABORT_LIMIT_S
            try:
                self._answer(lambda responses, tokens: None)
            finally:
                self.timeout_s = limit

    def _hung(self) -> SamplerFault:
        return self._ended(f"it gave no sign of life for {self.timeout_s:g} s ({self.timeout_key})")

    def _ended(self, why: str) -> SamplerFault:
        """Kill the process. Returns the fault to raise."""
        self.close()
        return SamplerFault(why)

    def _died(self) -> SamplerFault:
        """Return the fault of a process that closed its connection."""
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return self._ended("it closed its connection")
        return _ended_with(code)


def _ended_with(code: int) -> SamplerFault:
    """Return the fault of a process that was not ended by this class. code: `Popen.returncode`."""
    if code >= 0:
        return SamplerFault(f"its process ended with exit code {code}")
    hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
    return SamplerFault(f"its process was ended by {signal_name(-code)}{hint}")


def start_error(fault: SamplerFault, log: Path) -> SamplerError:
    """Return the error of a failed first start of vLLM."""
    hint = MEMORY_HINT if "memory" in str(fault).lower() or "KV cache" in str(fault) else ""
    return SamplerError(f"rollout.vllm: vLLM did not start: {fault}{hint}{log_hint(log)}")


def next_restart(
    fault: SamplerFault, restarts: int, limit: int, section: str, log: Path, say: Callable[[str], None]
) -> int:
    """Report that a failed sampler is about to be restarted.

    Args:
        fault: Why it failed.
        restarts: Number of restarts so far.
        limit: Value of `max_restarts`.
        section: Configuration section with `max_restarts`: `rollout.vllm` or `rollout.async`.
        log: The sampler's log.
        say: Called with one line for the user.

    Returns:
        Number of restarts including this one.

    Raises:
        SamplerError: The limit is reached.
    """
    failed = f"{'vLLM' if section == 'rollout.vllm' else 'the sampler'} failed: {fault}"
    if restarts == limit:
        raise SamplerError(
            f"{section}: {failed}; restarted {limit} times already ({section}.max_restarts){log_hint(log)}"
        ) from fault
    say(f"{failed}; restart {restarts + 1} of {limit}{log_hint(log)}")
    return restarts + 1


def log_hint(log: Path) -> str:
    """Return "; see LOG" for the end of an error message, or "" if the log is missing or empty."""
    return f"; see {log}" if log.exists() and log.stat().st_size else ""


def sampler_environment(environment: Mapping[str, str], plan: ReceiverPlan) -> dict[str, str]:
    """Return the environment of a sampler's process: the plan's GPUs are visible, and a launcher's variables are unset.

    vLLM would mistake a launcher's ranks for its own. The sampler does not communicate with other machines, so it uses
    the loopback interface. Each rank has its own cache of compiled code, because vLLM processes that start at the same
    time would read files that another one is writing.
    """
    own = child_environment(environment)
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
