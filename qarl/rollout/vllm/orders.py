"""Executes one order of the learner on a vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from qarl.rollout.engine import Progress
from qarl.rollout.vllm.host import Host
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
            requests, sampling = payload
            return host.generate(requests, sampling, progress)
        case "trace":
            return host.trace(*payload)
        case "sleep":
            return host.sleep(payload)
        case "wake":
            return host.wake()
    raise AssertionError(f"unknown operation {operation!r}")
