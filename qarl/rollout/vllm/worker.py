"""The sampler's process with vLLM: executes orders from one connection until the connection is closed.

It imports vLLM before the order to start arrives. Standard output and error go to the sampler's log file.
"""

from __future__ import annotations

import gc
import importlib
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

from qarl.errors import UserError
from qarl.rollout.engine import Progress
from qarl.rollout.vllm.channel import Channel
from qarl.rollout.vllm.host import Host
from qarl.rollout.vllm.phases import Phases
from qarl.rollout.vllm.sandbox import keep_compiled_code_private
from qarl.rollout.vllm.settings import AsyncSettings
from qarl.weight_sync.fingerprints import PublishError
from qarl.weight_sync.transport import open_receiver
from qarl.weight_sync.update import Arriving, WeightUpdate


class Aborted(Exception):
    """The learner aborted the operation."""


def execute(host: Host, operation: str, payload: Any, unpack: Callable[[Any], Arriving], progress: Progress) -> Any:
    """Execute one order.

    Args:
        host: The vLLM.
        operation: Name of the operation.
        payload: Its arguments.
        unpack: Opens the tensors and patches in a publish's payload.
        progress: See `Host.generate`.

    Returns:
        The result of the operation; of a publish, the seconds of its parts and the canary's log-probs.
    """
    match operation:
        case "publish":
            assert isinstance(payload, WeightUpdate)
            seconds = host.publish(payload.version, unpack(payload.payloads[0]), payload.expected)
            begin = time.perf_counter()
            scores = host.score(payload.canary)
            return seconds | {"score": time.perf_counter() - begin}, scores
        case "score":
            return host.score(payload)
        case "generate":
            return host.generate(*payload, progress)
        case "trace":
            return host.trace(*payload)
        case "sleep":
            return host.sleep(payload)
        case "wake":
            return host.wake()
    raise AssertionError(f"unknown operation {operation!r}")


def root_cause(error: BaseException) -> str:
    """Return the message of the first UserError in a chain of errors, else the first line of the original error."""
    while not isinstance(error, UserError):
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is None:
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        error = cause
    return str(error)


def send_failure(channel: Channel, error: Exception) -> None:
    """Send an error to the learner, and write its traceback to the log."""
    with suppress(OSError):  # a full disk
        traceback.print_exception(error)
    channel.send("failed", (root_cause(error), isinstance(error, PublishError)))


def serve(channel: Channel, phases: Phases) -> None:
    """Start vLLM by the first order, then execute orders until the connection is closed."""
    order = channel.poll(None)
    assert order is not None and order[0] == "start", "the first order starts vLLM"
    settings, expected, plan = order[1]
    phases.end("order")
    try:
        # During its start vLLM unfreezes all objects and collects garbage ten times, 0.25 s each with all imported
        # objects. They stay frozen here; vLLM freezes all objects again at the end of its start.
        with patch.object(gc, "unfreeze", lambda: None):
            host = Host(settings, expected, phases)
    except Exception as error:  # whatever vLLM raises
        send_failure(channel, error)
        return
    channel.send("done", host.capabilities())
    receiver = open_receiver(plan)

    def progress(responses: int, tokens: int) -> None:
        channel.send("progress", (responses, tokens))
        if (waiting := channel.poll(0)) is not None:
            assert waiting[0] == "abort", waiting[0]
            raise Aborted

    while (order := channel.poll(None)) is not None:
        operation, payload = order
        if operation == "abort":  # it arrived after the order had been completed
            continue
        if operation == "sample":
            assert isinstance(payload, AsyncSettings)
            from qarl.rollout.asynchronous.host import serve as serve_samples
            from qarl.rollout.asynchronous.vllm_host import VLLMHost

            serve_samples(channel, partial(VLLMHost, host, payload), receiver)
            return
        try:
            result = execute(host, operation, payload, receiver.take, progress)
        except Aborted:
            channel.send("aborted")
            continue
        except Exception as error:  # whatever vLLM raises
            send_failure(channel, error)
            continue
        finally:
            with suppress(OSError):  # a full disk
                sys.stdout.flush()
            receiver.done()
        channel.send("done", result)


def import_ahead(exact: bool) -> None:
    """Import the modules that the start of vLLM needs. Errors are ignored, because the start imports them again."""
    names = ["vllm.entrypoints.llm", "vllm.v1.engine.core"]
    names.append(f"qarl.rollout.vllm.{'exact' if exact else 'own_kernels'}.numerics")
    with suppress(Exception):
        from vllm.platforms import current_platform

        # cpu_worker patches torch before it imports gpu_worker, so only the platform's own is imported.
        names.append(f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker")
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)


def main(descriptor: int, numerics: str, begun: float) -> None:
    """Run the process.

    Args:
        descriptor: File descriptor of the connection.
        numerics: `exact` or `fast`.
        begun: Start of the process by `time.monotonic()`.
    """
    phases = Phases(begun)
    phases.end("process")
    channel = Channel(socket.socket(fileno=descriptor))
    keep_compiled_code_private()
    gc.disable()
    import_ahead(numerics == "exact")
    gc.freeze()
    gc.enable()
    phases.end("imports")
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the learner is gone
        serve(channel, phases)
