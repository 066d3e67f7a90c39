"""Kernels compiled before they are needed, side by side.

A kernel is compiled at its first launch, while everything waits: half a second and more each, most of it outside
Python. Here launches that were recorded (`qarl_kernels.launch.recording`) are compiled in threads, into Triton's
caches, where the launches themselves find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime._async_compile import AsyncCompileMode
from triton.tools.tensor_descriptor import TensorDescriptor

from qarl_kernels.launch import Launch


@dataclass(frozen=True)
class Pointer:
    """In a tensor's place, what a kernel is compiled for of it. offset: of its address from a multiple of 16."""

    dtype: torch.dtype
    offset: int

    @classmethod
    def to(cls, tensor: Tensor) -> Pointer:
        return cls(tensor.dtype, tensor.data_ptr() % 16)

    def data_ptr(self) -> int:
        return self.offset


class Different(list[Launch]):
    """For `recording`: launches of different kinds alone, without their tensors.

    Whole forwards are recorded, of dozens of layers and many batch sizes: their tensors would be what no GPU holds.
    Launches of one kind run the same compiled kernel; some of different kinds do too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: set[tuple[Any, ...]] = set()

    def append(self, launch: Launch) -> None:
        kind = kind_of(launch)
        if kind not in self._kinds:
            self._kinds.add(kind)
            arguments = {name: _without_memory(value) for name, value in launch.arguments.items()}
            super().append(replace(launch, arguments=arguments))


def compile_ahead(launches: Sequence[Launch], device: torch.device, threads: int) -> int:
    """Compile and load what these launches would run on a CUDA device. Returns how many kernels that are.

    A kernel that does not compile, or that the device cannot hold, is left to its launch, which says so.
    """
    with torch.cuda.device(device), ThreadPoolExecutor(threads) as pool:
        with AsyncCompileMode(pool, ignore_errors=True):
            futures = [
                launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options) for launch in launches
            ]
        made = {id(kernel): kernel for future in futures if (kernel := _compiled(future)) is not None}
        return sum(pool.map(lambda kernel: _load(kernel, device), made.values()))


def _compiled(future: Any) -> Any:
    """The kernel that a warm-up gave, which is there; None if it failed, or a hook did without it."""
    return future.result(ignore_errors=True) if hasattr(future, "result") else future


def _load(kernel: Any, device: torch.device) -> bool:
    """Make its launcher, which Triton 3.6 compiles too, and put it on the device. Returns whether that went well."""
    with torch.cuda.device(device), suppress(Exception):
        kernel._init_handles()
        return True
    return False


def kind_of(launch: Launch) -> tuple[Any, ...]:
    """What a launch's compiled kernel depends on, and some more; see `qarl_kernels.direct` for what that is."""
    whole = _whole_numbers(launch.kernel)
    arguments = tuple((name, _of_argument(value, whole.get(name))) for name, value in launch.arguments.items())
    return id(launch.kernel), arguments, tuple(launch.options.items())


_numbers: dict[int, dict[str, bool]] = {}  # by the kernel's id


def _whole_numbers(kernel: Any) -> dict[str, bool]:
    """Of each parameter that is not constexpr, whether an integer's value matters. Nothing in the interpreter."""
    found = _numbers.get(id(kernel))
    if found is None:
        given = [parameter for parameter in getattr(kernel, "params", ()) if not parameter.is_constexpr]
        found = _numbers[id(kernel)] = {parameter.name: not parameter.do_not_specialize for parameter in given}
    return found


def _of_argument(value: Any, specialized: bool | None) -> Any:
    """specialized: see `_whole_numbers`; None: the value itself matters."""
    if isinstance(value, Tensor):
        return Pointer.to(value)
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape), value.padding
    if specialized is None or type(value) not in (int, float):
        return value if isinstance(value, Pointer) else (type(value), repr(value))
    if isinstance(value, float):
        return float
    width = -(2**31) <= value < 2**31, -(2**63) <= value < 2**63
    return (width, value == 1, value % 16 == 0) if specialized else width


def _without_memory(value: Any) -> Any:
    """The same to Triton's binder, which asks a tensor for its dtype and its address."""
    if isinstance(value, Tensor):
        return Pointer.to(value)
    if isinstance(value, TensorDescriptor):
        held = object.__new__(TensorDescriptor)
        vars(held).update(vars(value), base=_without_memory(value.base))
        return held
    return value
