"""Compile kernels before they are needed, in parallel.

The first launch of a kernel compiles it, which takes half a second or more, mostly outside Python. `compile_ahead`
compiles the kernels that a function would launch in several threads. Later launches find them in Triton's caches.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from triton.runtime._async_compile import AsyncCompileMode

from qarl_kernels.launch import Launch, recording


class _Compilations(list[Launch]):
    """List for `recording` that compiles each launch instead of keeping it, so that the memory of its tensors is freed.

    Triton compiles equal launches only once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started: dict[int, Any] = {}  # kernels, or futures of kernels, by their id

    def append(self, launch: Launch) -> None:
        started = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
        self.started[id(started)] = started


def compile_ahead(function: Callable[[], object], device: torch.device, threads: int) -> int:
    """Compile and load the kernels that `function` launches on a CUDA device, without running them.

    Kernels that do not compile, or do not fit the device, are skipped; their launch reports the error.

    Returns:
        The number of kernels loaded.
    """
    compilations = _Compilations()
    capability = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device), ThreadPoolExecutor(threads) as pool:
        with AsyncCompileMode(pool, ignore_errors=True), recording(capability, compilations):
            function()
        started = compilations.started.values()
        kernels = [one.result(ignore_errors=True) if hasattr(one, "result") else one for one in started]
        made = {id(kernel): kernel for kernel in kernels if kernel is not None}
        return sum(pool.map(lambda kernel: _load(kernel, device), made.values()))


def _load(kernel: Any, device: torch.device) -> bool:
    """Build the kernel's launcher, which Triton 3.6 compiles too, and load it. Returns whether that succeeded."""
    with torch.cuda.device(device), suppress(Exception):
        kernel._init_handles()
        return True
    return False
