"""Compile qarl's kernels on all cores before they are measured: one after the other they take longer than the timing.

Wrappers run on meta tensors inside `qarl_kernels.launch.recording`; forked workers then compile what was recorded into
Triton's cache on disk, for a device that a stand-in driver describes, so that no worker touches the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import triton
from qarl_kernels.launch import Launch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor


class _Driver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


_pending: list[Launch] = []  # reached by forked workers: a kernel cannot be pickled


def _start(capability: tuple[int, int]) -> None:
    triton.runtime.driver.set_active(_Driver(capability))


def _compile(index: int) -> str:
    launch = _pending[index]
    try:
        launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
    except (RuntimeError, TritonError) as error:  # it fails again, and is reported, where it is measured
        return f"{launch.kernel.__name__}: {type(error).__name__}"
    return ""


def _kind(launch: Launch) -> str:
    """Equal for launches that Triton compiles to one kernel, and different for some of those too."""
    values = [value.base if isinstance(value, TensorDescriptor) else value for value in launch.arguments.values()]
    blocks = [value.block_shape for value in launch.arguments.values() if isinstance(value, TensorDescriptor)]
    types = [value.dtype if isinstance(value, Tensor) else value for value in values]
    return f"{launch.kernel.__name__} {types} {blocks} {launch.options}"


def precompile(launches: Sequence[Launch], capability: tuple[int, int], processes: int | None = None) -> list[str]:
    """Compile the launches into Triton's cache, each kind once; returns a line for each that failed."""
    _pending[:] = {_kind(launch): launch for launch in launches}.values()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes or os.cpu_count(), context, _start, (capability,)) as pool:
        failed = [line for line in pool.map(_compile, range(len(_pending))) if line]
    _pending.clear()
    return failed
