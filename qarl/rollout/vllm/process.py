"""The learner's handle of the sampler's process: start, orders, signs of life, the end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qarl.publish.verify import Fingerprint, PublishError
from qarl.rollout.vllm.settings import SamplerSettings
from qarl.rollout.vllm.transport import ReceiverPlan

TICK_S = 0.1  # between two looks at a busy sampler
ABORT_LIMIT_S = 30.0  # for an engine step that is under way when the user interrupts

Tick = Callable[[int, int], None]


class SamplerFault(Exception):
    """vLLM did not do what it was asked to. The message says what happened, in one line."""


class SamplerProcess:
    """A vLLM in a process of its own, which leads a session: the terminal's Ctrl-C does not reach it.

    log: gets what vLLM prints. timeout_s: without a sign of life for so long it counts as hung. plan: of
    the other end of the carrier that publications come by.
    """

    def __init__(
        self, settings: SamplerSettings, expected: Mapping[str, Fingerprint], plan: ReceiverPlan, log: Path,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self.timeout_s, self.log = timeout_s, log
        self.facts: dict[str, Any] = {}
        self._connection, child = multiprocessing.Pipe()
        environment = dict(os.environ)
        if settings.cuda is not None:
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            chosen = visible.split(",")[settings.cuda] if visible else str(settings.cuda)
            environment["CUDA_VISIBLE_DEVICES"] = chosen
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "qarl.rollout.vllm.worker", str(child.fileno())],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(child.fileno(), *plan.fds),
                start_new_session=True, env=environment,
            )  # fmt: skip
        child.close()
        self._order = (settings, dict(expected), plan)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, tick: Tick) -> None:
        """Wait until vLLM is ready. tick(0, 0): called meanwhile. Raises SamplerFault, PublishError."""
        self._send(self._order)
        self.facts = self._answer(tick)

    def call(self, operation: str, payload: Any, tick: Tick) -> Any:
        """Give an order and wait for its result. tick(responses, tokens): called meanwhile; what it raises aborts.

        Raises SamplerFault: it died, hung (and was killed), or failed. PublishError: see `Host.publish`.
        """
        self.begin(operation, payload)
        return self.finish(tick)

    def begin(self, operation: str, payload: Any) -> None:
        """Give an order; `finish` waits for its result."""
        self._send((operation, payload))

    def finish(self, tick: Tick) -> Any:
        try:
            return self._answer(tick)
        except (SamplerFault, PublishError):
            raise
        except BaseException:  # the user's interrupt: the sampler must be usable afterwards
            self._abort()
            raise

    def close(self) -> None:
        """End it. It holds nothing that must be kept."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _send(self, message: Any) -> None:
        if self._connection.closed:  # by `_abort`
            raise SamplerFault("it did not let go of what was interrupted, and was ended")
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error

    def _answer(self, tick: Tick) -> Any:
        deadline = time.monotonic() + self.timeout_s
        responses = tokens = 0
        while True:
            if self._connection.poll(TICK_S):
                try:
                    kind, value = self._connection.recv()
                except (EOFError, ConnectionResetError) as error:
                    raise self._died() from error
                deadline = time.monotonic() + self.timeout_s
                match kind:
                    case "ready" | "done":
                        return value
                    case "failed":
                        raise PublishError(value.message) if value.publish else SamplerFault(value.message)
                    case "progress":
                        responses, tokens = value
            elif self._process.poll() is not None:
                raise self._died()
            elif time.monotonic() > deadline:
                self.close()
                raise SamplerFault(f"it gave no sign of life for {self.timeout_s:g} s (rollout.vllm.timeout_s)")
            tick(responses, tokens)

    def _abort(self) -> None:
        """Let it forget the operation under way; it is ended if it does not within a while."""
        with suppress(SamplerFault, PublishError):
            self._send(("abort", None))
            limit, self.timeout_s = self.timeout_s, ABORT_LIMIT_S
            try:
                self._answer(lambda responses, tokens: None)
            finally:
                self.timeout_s = limit

    def _died(self) -> SamplerFault:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.close()
            return SamplerFault("it closed its connection")
        if code >= 0:
            return SamplerFault(f"its process ended with exit code {code}")
        hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
        return SamplerFault(f"its process was ended by {signal.Signals(-code).name}{hint}")
