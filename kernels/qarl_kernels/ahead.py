"""Kernels compiled before they are needed, side by side.

A kernel is compiled at its first launch, while everything waits: half a second and more each, most of it outside
Python. Here launches that were recorded (`qarl_kernels.launch.recording`) are compiled in threads, into Triton's
caches, where the launches themselves find them.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from triton.runtime._async_compile import AsyncCompileMode
from triton.tools.tensor_descriptor import TensorDescriptor

from qarl_kernels.launch import Launch


def compile_ahead(launches: Iterable[Launch], device: torch.device, threads: int) -> int:
    """Compile and load what these launches would run on a CUDA device. Returns how many kernels that are.

    A kernel that does not compile is left to its launch, which says so.
    """
    different = list({_kind(launch): launch for launch in launches}.values())
    with torch.cuda.device(device), ThreadPoolExecutor(threads) as pool:
        with AsyncCompileMode(pool, ignore_errors=True):
            futures = [
                launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options) for launch in different
            ]
        made = {id(kernel): kernel for future in futures if (kernel := _compiled(future)) is not None}
        list(pool.map(lambda kernel: _load(kernel, device), made.values()))
    return len(made)


def _compiled(future: Any) -> Any:
    """The kernel that a warm-up gave, which is there; None if it failed, or a hook did without it."""
    return future.result(ignore_errors=True) if hasattr(future, "result") else future


def _load(kernel: Any, device: torch.device) -> None:
    """Make its launcher, which Triton 3.6 compiles too, and put it on the device."""
    with torch.cuda.device(device):
        kernel._init_handles()


def _kind(launch: Launch) -> tuple[Any, ...]:
    """Launches with the same run the same compiled kernel; others may too."""
    arguments = tuple((name, _of_argument(value)) for name, value in launch.arguments.items())
    return id(launch.kernel), arguments, tuple(launch.options.items())


def _of_argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape), value.padding
    return type(value), repr(value)
