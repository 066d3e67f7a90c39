"""Time of each part of vLLM's start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

# The steps of vLLM's worker in order, and the phase that each one ends.
STEPS = {
    "init_device": "device",
    "load_model": "weights",
    "determine_available_memory": "profile",
    "initialize_from_config": "kv_cache",
    "compile_or_warm_up_model": "warm_up",
}


class Phases:
    """Consecutive phases of a start.

    Args:
        begun: Begin of the first phase by `time.monotonic()`, which all processes of a machine share.

    Attributes:
        seconds: Of each finished phase, by name, in order.
    """

    def __init__(self, begun: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic() if begun is None else begun

    def end(self, phase: str) -> None:
        """End a phase that began when the previous one ended; further parts of a phase are added to it."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def line(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"vLLM is ready after {sum(self.seconds.values()):.2f} s: {parts}"

    @contextmanager
    def of_worker(self, loaded: Callable[[Any], None]) -> Iterator[None]:
        """Inside, vLLM's worker ends the phases of `STEPS`, and phase graphs after the capture of CUDA graphs.

        The time before its first step is phase engine. loaded: Called with the worker once it has loaded the weights;
        its time is phase compile.
        """
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        make = WorkerWrapperBase.init_worker
        replacements = ExitStack()

        def told(owner: Any, name: str, before: str, after: str) -> None:
            step = getattr(owner, name)

            @wraps(step)
            def telling(*arguments: Any, **options: Any) -> Any:
                self.end(before)
                result = step(*arguments, **options)
                self.end(after)
                if name == "init_device" and hasattr(worker := owner.model_runner, "capture_model"):
                    told(worker, "capture_model", "warm_up", "graphs")
                if name == "load_model":
                    loaded(owner)
                    self.end("compile")
                return result

            replacements.enter_context(patch.object(owner, name, telling))

        @wraps(make)
        def making(wrapper: Any, *arguments: Any, **options: Any) -> None:
            make(wrapper, *arguments, **options)
            for name, phase in STEPS.items():
                told(wrapper.worker, name, "engine", phase)

        with replacements, patch.object(WorkerWrapperBase, "init_worker", making):
            yield
