"""One place through which every Triton kernel is launched.

`launch` runs a kernel on the device of its tensors, or in Triton's interpreter when TRITON_INTERPRET=1 was set before
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

from qarl_kernels.direct import Descriptor, Direct, for_triton

INTERPRETED = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, its arguments by name (tensors, descriptors, numbers) and the compiler's options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


ADA = (8, 9)

_collected: list[Launch] | None = None
_capability: tuple[int, int] | None = None
_direct: dict[int, Direct] = {}  # by the kernel's id: its hash is that of its source


def launch(kernel: Any, grid: Sequence[int], *, num_warps: int = 4, num_stages: int = 3, **arguments: Any) -> None:
    """Run `kernel` over `grid`; every argument goes by name. Does nothing when the grid is empty."""
    if 0 in grid:
        return
    if _collected is not None:
        _collected.append(Launch(kernel, tuple(grid), _for_triton(arguments), _options(num_warps, num_stages)))
    elif INTERPRETED:
        kernel[tuple(grid)](**_for_triton(arguments))
    else:
        direct = _direct.get(id(kernel))
        if direct is None:
            direct = _direct[id(kernel)] = Direct(kernel)

        def ordinary() -> Any:
            with torch.cuda.device(_device_of(arguments)):
                return kernel[tuple(grid)](**_for_triton(arguments), **_options(num_warps, num_stages))

        direct.launch(tuple(grid), num_warps, num_stages, arguments, ordinary)


def _options(num_warps: int, num_stages: int) -> dict[str, Any]:
    # Contracting a * b + c would make results differ from the reference; Triton's default changes with its version.
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


def _for_triton(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: for_triton(value) for name, value in arguments.items()}


def _device_of(arguments: dict[str, Any]) -> torch.device:
    for value in arguments.values():
        if isinstance(value, Descriptor):
            value = value.base
        if isinstance(value, Tensor):
            return value.device
    raise AssertionError("a kernel without tensors")


@contextmanager
def recording(capability: tuple[int, int] = (9, 0), collected: list[Launch] | None = None) -> Iterator[list[Launch]]:
    """Collect launches instead of running them; tensors may live on any device, results keep what memory held.

    capability: the compute capability that choices between kernels are made for, as (9, 0). collected: gets the
    launches, with all tensors that they were to read and write; None: a new list.
    """
    global _collected, _capability
    before = _collected, _capability
    _collected, _capability = [] if collected is None else collected, capability
    try:
        yield _collected
    finally:
        _collected, _capability = before


def collecting() -> bool:
    """Whether launches are collected instead of run, so that results say nothing."""
    return _collected is not None


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(tensor: Tensor) -> int:
    """Multiprocessors of the tensor's GPU; 132 (Hopper's) where there is none."""
    return _multiprocessors(tensor.get_device()) if tensor.is_cuda else 132


@cache
def _device_name(index: int) -> str:
    words = torch.cuda.get_device_name(index).lower().replace("nvidia", "").split()
    return words[0] if words else "unknown"


def device_name(tensor: Tensor) -> str:
    """Short name of the tensor's GPU, as in `tables/`: h100, h200, a100, l4; h100 where there is none."""
    return _device_name(tensor.get_device()) if tensor.is_cuda else "h100"


@cache
def _device_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability_of(tensor: Tensor) -> tuple[int, int]:
    """Compute capability whose kernels run on this tensor; the interpreter counts as (9, 0).

    12.x, Blackwell in graphics cards, has the shared memory of 8.9 and no products of warpgroups, and gets its kernels.
    """
    found = _capability
    if found is None:
        found = (9, 0) if INTERPRETED or not tensor.is_cuda else _device_capability(tensor.get_device())
    return ADA if found[0] == 12 else found


def supports_tma(tensor: Tensor) -> bool:
    """Whether the tensor memory accelerator can read this matrix: Hopper or later, 16-byte aligned rows."""
    strides = tensor.stride()
    return (
        strides[-1] == 1
        and strides[0] * tensor.element_size() % 16 == 0
        and tensor.data_ptr() % 16 == 0
        and capability_of(tensor) >= (9, 0)
        and tensor.numel() > 0
    )
