"""Where the time of vLLM's start goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

# A worker's own steps, in their order, and the phase that each one ends.
STEPS = {
    "init_device": "device",
    "load_model": "weights",
    "determine_available_memory": "profile",
    "initialize_from_config": "kv_cache",
    "compile_or_warm_up_model": "warm_up",
}


class Phases:
    """Phases that follow one another without a gap. seconds: of each that has ended, by name, in their order.

    begun: when the first one began, by `time.monotonic()`, which all processes of a machine have in common.
    """

    def __init__(self, begun: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic() if begun is None else begun

    def end(self, phase: str) -> None:
        """The time since the end of the phase before was this one's; a second part of a phase is added to its first."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def line(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"vLLM is ready after {sum(self.seconds.values()):.2f} s: {parts}"

    @contextmanager
    def of_worker(self, loaded: Callable[[Any], None]) -> Iterator[None]:
        """Inside, a worker that vLLM makes ends the phases of `STEPS`, and graphs: the capture of CUDA graphs.

        What precedes its first step is called engine. loaded: is called with the worker once it holds the weights; its
        time is a phase compile.
        """
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        make = WorkerWrapperBase.init_worker
        undo: list[tuple[Any, str]] = []

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

            setattr(owner, name, telling)
            undo.append((owner, name))

        @wraps(make)
        def making(wrapper: Any, *arguments: Any, **options: Any) -> None:
            make(wrapper, *arguments, **options)
            for name, phase in STEPS.items():
                told(wrapper.worker, name, "engine", phase)

        WorkerWrapperBase.init_worker = making
        try:
            yield
        finally:
            WorkerWrapperBase.init_worker = make
            for owner, name in undo:
                delattr(owner, name)
