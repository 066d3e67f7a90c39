"""Measures how long each part of vLLM's start takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

# Methods of vLLM's worker in the order of their calls, and the name of the phase that each of them is.
STEPS = {
    "init_device": "device",
    "load_model": "weights",
    "determine_available_memory": "profile",
    "initialize_from_config": "kv_cache",
    "compile_or_warm_up_model": "warm_up",
}


class Phases:
    """Durations of consecutive phases of a start.

    Args:
        begun: Start of the first phase by `time.monotonic()`, which all processes of a machine share. Default: now.

    Attributes:
        seconds: Duration of each finished phase by name, in order.
    """

    def __init__(self, begun: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic() if begun is None else begun

    def end(self, phase: str) -> None:
        """End a phase that began when the previous one ended. If it was ended before, the durations are added."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def line(self) -> str:
        """Return all durations as one line for the log."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"vLLM is ready after {sum(self.seconds.values()):.2f} s: {parts}"

    @contextmanager
    def time_worker(self, loaded: Callable[[Any], None]) -> Iterator[None]:
        """Context manager: time the methods of the worker that vLLM creates.

        Phases are those of `STEPS`, `graphs` (capture of CUDA graphs), `compile` (the call of `loaded`) and `engine`
        (time between the others).

        Args:
            loaded: Called with the worker after it has loaded the weights.
        """
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        init_worker = WorkerWrapperBase.init_worker
        patches = ExitStack()

        def time_step(owner: Any, name: str, before: str, after: str) -> None:
            step = getattr(owner, name)

            @wraps(step)
            def timed(*arguments: Any, **options: Any) -> Any:
                self.end(before)
                result = step(*arguments, **options)
                self.end(after)
                if name == "init_device" and hasattr(runner := owner.model_runner, "capture_model"):
                    time_step(runner, "capture_model", "warm_up", "graphs")
                if name == "load_model":
                    loaded(owner)
                    self.end("compile")
                return result

            patches.enter_context(patch.object(owner, name, timed))

        @wraps(init_worker)
        def init_timed_worker(wrapper: Any, *arguments: Any, **options: Any) -> None:
            init_worker(wrapper, *arguments, **options)
            for name, phase in STEPS.items():
                time_step(wrapper.worker, name, "engine", phase)

        with patches, patch.object(WorkerWrapperBase, "init_worker", init_timed_worker):
            yield
