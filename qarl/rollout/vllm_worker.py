"""The sampler's process with vLLM: executes orders from one connection until the connection is closed.

It imports vLLM before the order to start arrives. Standard output and error go to the sampler's log file.
"""

from __future__ import annotations

import gc
import importlib
import socket
import sys
from contextlib import suppress
from functools import partial
from unittest.mock import patch

from qarl.rollout.vllm.channel import Channel, send_failure
from qarl.rollout.vllm.host import Host
from qarl.rollout.vllm.phases import Phases
from qarl.rollout.vllm.sandbox import keep_compiled_code_private
from qarl.rollout.vllm.settings import AsyncSettings
from qarl.weight_sync.transport import open_receiver


class Aborted(Exception):
    """The learner aborted the operation."""


def serve(channel: Channel, phases: Phases) -> None:
    """Start vLLM with the settings of the first order, then execute orders until the connection is closed.

    phases: Measures the parts of the start.
    """
    order = channel.poll(None)
    assert order is not None and order[0] == "start", "the first order starts vLLM"
    settings, expected, plan = order[1]
    phases.end("order")
    try:
        # While it starts, vLLM unfreezes all objects and collects garbage ten times, which takes 0.25 s each with all
        # imported objects. Here they stay frozen. vLLM freezes all objects again at the end of its start.
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
        if operation == "abort":  # arrived after the order that it aborts had completed
            continue
        if operation == "sample":
            assert isinstance(payload, AsyncSettings)
            from qarl.rollout.asynchronous.host import serve as serve_samples
            from qarl.rollout.asynchronous.vllm_host import VLLMHost

            serve_samples(channel, partial(VLLMHost, host, payload), receiver)
            return
        try:
            result = host.execute(operation, payload, receiver.take, progress)
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

        # cpu_worker patches torch before it imports gpu_worker, so only this platform's worker is imported.
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
