"""Launches all Triton kernels.

`launch` runs a kernel on the device of its tensors, or in Triton's interpreter if TRITON_INTERPRET=1 was set before
import. Inside `recording()` nothing runs: launches are collected, so that they can be compiled ahead
(`qarl_kernels.ahead`), and a machine without a GPU can compile exactly what a GPU would (see
`tests/kernels/compiling.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = bool(triton.knobs.runtime.interpret)
ADA = (8, 9)

device_index = Tensor.get_device  # -1 on the CPU


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, its arguments by name (tensors, descriptors, numbers) and the compiler's options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


_collected: list[Launch] | None = None
_capability: tuple[int, int] | None = None


def launch(kernel: Any, grid: Sequence[int], *, num_warps: int = 4, num_stages: int = 3, **arguments: Any) -> None:
    """Run a kernel; does nothing if the grid is empty.

    Args:
        kernel: A `triton.jit` function.
        grid: Programs along up to three axes.
        num_warps, num_stages: Options of the compiler.
        arguments: All arguments of the kernel, by name.
    """
    if 0 in grid:
        return
    if _collected is not None:
        _collected.append(Launch(kernel, tuple(grid), arguments, _options(num_warps, num_stages)))
    elif INTERPRETED:
        kernel[tuple(grid)](**arguments)
    else:
        _run_compiled(kernel, tuple(grid), num_warps, num_stages, arguments)


def tma_descriptor(tensor: Tensor, block_shape: Sequence[int]) -> TensorDescriptor:
    """Describe a tensor for loads and stores of blocks by the tensor memory accelerator; see `supports_tma`."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block_shape))


def _options(num_warps: int, num_stages: int) -> dict[str, Any]:
    # Contracting a * b + c would make results differ from the reference; Triton's default changes with its version.
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


class _Compiled:
    """The compiled forms of one kernel, for arguments of given Python types.

    `kernel[grid](...)` binds and specializes every argument, formats the options and asks the driver about every
    pointer at each launch. On an H100 a forward of 128 tokens of Qwen3-1.7B's shapes takes 23 ms that way, and 12 ms
    this way (benchmarks/results/launch_gpu.json); recording whole functions and replaying their launches took 5.5 ms,
    and 500 lines more. With 16,384 tokens the GPU hides the launches, and all three take the same time.

    A compiled form is kept under everything that Triton (3.6 to 3.9) specializes on. Beside the Python types that is:
    values of constexpr arguments; dtype of a tensor, and whether its address is a multiple of 16; whether an integer is
    1, a multiple of 16, or fits 32 bits; dtype and block of a descriptor; compiler options; the device.
    """

    def __init__(self, kernel: Any, types: Sequence[type]) -> None:
        runtime = [i for i, parameter in enumerate(kernel.params) if not parameter.is_constexpr]
        self.tensors = [i for i in runtime if types[i] in (Tensor, Parameter)]
        self.integers = [i for i in runtime if types[i] is int]
        self.descriptors = [i for i in runtime if types[i] is TensorDescriptor]
        # Of floats and None, Triton looks at the type only. It looks at the value of everything else.
        typed = {i for i in runtime if types[i] in (Tensor, Parameter, int, TensorDescriptor, float, type(None))}
        self.constants = [i for i in range(len(types)) if i not in typed]
        self.forms: dict[tuple[Any, ...], Any] = {}


_compiled: dict[tuple[int, tuple[type, ...]], _Compiled] = {}  # by id of the kernel, whose hash is slow, and types


def _run_compiled(
    kernel: Any, grid: tuple[int, ...], num_warps: int, num_stages: int, arguments: dict[str, Any]
) -> None:
    """Launch the compiled form for these arguments; Triton's own launch compiles it the first time."""
    values = [arguments[name] for name in kernel.arg_names]
    types = tuple(map(type, values))
    known = _compiled.get((id(kernel), types))
    if known is None:
        known = _compiled[id(kernel), types] = _Compiled(kernel, types)
    described = [values[i] for i in known.descriptors]
    tensors = [values[i] for i in known.tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    device = device_index(tensors[0] if tensors else described[0].base)
    key = (
        device,
        num_warps,
        num_stages,
        *[values[i] for i in known.constants],
        *[_specialized(values[i]) for i in known.integers],
        *[tensor.dtype for tensor in tensors],
        *[address % 16 == 0 for address in addresses],
        *[(one.base.dtype, *one.block_shape) for one in described],
    )
    form = known.forms.get(key)
    on_device = device == driver.active.get_current_device() and all(device_index(one) == device for one in tensors)
    if form is None or not on_device or _hooked():
        with torch.cuda.device(device):
            known.forms[key] = kernel[grid](**arguments, **_options(num_warps, num_stages))
        return
    for i, address in zip(known.tensors, addresses, strict=True):
        values[i] = address
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    form.run(x, y, z, stream, form.function, form.packed_metadata, None, None, None, *values)


def _specialized(value: int) -> tuple[bool, bool, bool]:
    """Return the key that Triton specializes an integer argument by."""
    return value == 1, value % 16 == 0, -(2**31) <= value < 2**31


def _hooked() -> bool:
    """Return whether hooks, such as a profiler's, must see launches; only Triton's own launch calls them."""
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook  # a chain with a list of calls, or None
    return any(getattr(hook, "calls", hook) for hook in hooks)


@contextmanager
def recording(capability: tuple[int, int] = (9, 0), collected: list[Launch] | None = None) -> Iterator[list[Launch]]:
    """Collect launches instead of running them. Tensors may live on any device; results keep uninitialized memory.

    Args:
        capability: The compute capability that kernels are chosen for.
        collected: Receives the launches, with all their tensors; None: a new list.
    """
    global _collected, _capability
    before = _collected, _capability
    _collected, _capability = [] if collected is None else collected, capability
    try:
        yield _collected
    finally:
        _collected, _capability = before


def collecting() -> bool:
    """Return whether launches are collected instead of run, so that results are meaningless."""
    return _collected is not None


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(tensor: Tensor) -> int:
    """Return the number of multiprocessors of the tensor's GPU; 132 (Hopper's) without a GPU."""
    return _multiprocessors(tensor.get_device()) if tensor.is_cuda else 132


@cache
def _device_name(index: int) -> str:
    words = torch.cuda.get_device_name(index).lower().replace("nvidia", "").split()
    return words[0] if words else "unknown"


def device_name(tensor: Tensor) -> str:
    """Return the short name of the tensor's GPU, as in `tables/`: h100, h200, a100, l4; h100 without a GPU."""
    return _device_name(tensor.get_device()) if tensor.is_cuda else "h100"


@cache
def _device_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability_of(tensor: Tensor) -> tuple[int, int]:
    """Return the compute capability whose kernels run on this tensor; the interpreter counts as (9, 0).

    12.x, Blackwell in graphics cards, has the shared memory of 8.9 and no wgmma, so it gets the kernels of 8.9.
    """
    found = _capability
    if found is None:
        found = (9, 0) if INTERPRETED or not tensor.is_cuda else _device_capability(tensor.get_device())
    return ADA if found[0] == 12 else found


def supports_tma(tensor: Tensor) -> bool:
    """Return whether the tensor memory accelerator can read this matrix: Hopper or later, 16-byte aligned rows."""
    strides = tensor.stride()
    return (
        strides[-1] == 1
        and strides[0] * tensor.element_size() % 16 == 0
        and tensor.data_ptr() % 16 == 0
        and capability_of(tensor) >= (9, 0)
        and tensor.numel() > 0
    )
