"""Launches of kernels that Triton has compiled already, past its binder.

`kernel[grid](...)` binds and specialises its arguments, prints the options, walks hooks and asks the driver about every
pointer: tens of microseconds of the host, longer than most of a decoder's kernels run. All of it depends on the
arguments' kinds alone, so the compiled kernel is kept under those, and later launches hand it addresses at once.

What Triton (3.6 and 3.9) specialises on, and what is part of the key here: values and types of constexpr arguments; the
dtype of a tensor and whether its address is a multiple of 16; whether an integer is 1, a multiple of 16, and fits 32
bits; dtype, block and padding of a descriptor; which arguments are None; options; the device. Anything else goes the
ordinary way, as does every launch while hooks are installed, which want to see it. Not looked at again: settings of
Triton that change while a process runs, and globals of a kernel, which Triton would refuse to see changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

KEPT_DESCRIPTORS = 4096  # at most, in one place: their shapes follow the batch; some hundred bytes each
_CONSTANTS = frozenset({bool, int, float, str, type(None), tl.dtype})

device_index = Tensor.get_device  # -1 for the host
current_device = torch.cuda.current_device
# A build of torch without CUDA has none, and comes to no launch.
current_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Form:
    """A compiled kernel, ready to start."""

    def __init__(self, compiled: Any) -> None:
        self._run, self._function, self._packed = compiled.run, compiled.function, compiled.packed_metadata
        # Triton 3.6 encodes every descriptor anew at every launch, in Python. What it would pass is kept here by
        # address and layout, and given to its compiled launcher. Other versions order that launcher's arguments
        # otherwise, and a kernel with scratch memory needs it allocated: those take the way that all versions have.
        launcher = self._run
        self._raw: Any = None
        self._options: tuple[Any, ...] = ()
        self._described: list[tuple[int, Any, dict[Any, list[Any]]]] = []
        if not triton.__version__.startswith("3.6.") or launcher.global_scratch_size or launcher.profile_scratch_size:
            return
        held = inspect.getclosurevars(launcher.launch).nonlocals if inspect.isfunction(launcher.launch) else {}
        if None in (held.get("tensordesc_meta") or ()):
            return  # descriptors that the kernel takes apart, with the tensor itself among their parts
        modes, no_scratch, no_hooks = (launcher.launch_cooperative_grid, launcher.launch_pdl), (None,) * 2, (None,) * 3
        self._options = *modes, *no_scratch, self._packed, *no_hooks
        self._raw = launcher.launch
        if "tensordesc_indices" in held:
            self._raw = held["launcher"]
            places = sorted(held["tensordesc_indices"], reverse=True)  # from the last: what is put in moves the others
            metas = reversed(held["tensordesc_meta"])
            self._described = [(place, meta, {}) for place, meta in zip(places, metas, strict=True)]

    def start(self, grid: tuple[int, ...], device: int, passed: list[Any]) -> None:
        """passed: all arguments by place, constants too, tensors as addresses."""
        assert current_stream is not None
        x, y, z = (*grid, 1, 1)[:3]
        stream = current_stream(device)
        if self._raw is None:
            self._run(x, y, z, stream, self._function, self._packed, None, None, None, *passed)
            return
        for place, meta, known in self._described:
            value = passed[place]
            key = value.base.data_ptr(), *value.shape, *value.strides
            expanded = known.get(key)
            if expanded is None:
                if len(known) == KEPT_DESCRIPTORS:
                    known.clear()
                expanded = known[key] = nvidia.make_tensordesc_arg(value, meta)
            passed[place : place + 1] = expanded
        self._raw(x, y, z, stream, self._function, *self._options, *passed)


class Direct:
    """The compiled forms of one kernel. Where Triton's objects are not as expected, every launch is an ordinary one."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], _Form] = {}
        try:
            names = [parameter.name for parameter in kernel.params]
            fixed = [place for place, parameter in enumerate(kernel.params) if parameter.is_constexpr]
            self._runtime, self._before = triton.knobs.runtime, kernel.pre_run_hooks
            self._watched()
        except AttributeError:
            self._usable = False
            return
        self._usable = current_stream is not None
        self._count = len(names)
        self._values, self._constants = _picker(names), _picker(fixed)
        self._places = [place for place in range(len(names)) if place not in fixed]

    def launch(
        self,
        grid: tuple[int, ...],
        num_warps: int,
        num_stages: int,
        arguments: dict[str, Any],
        ordinary: Callable[[], Any],
    ) -> None:
        """Run over grid. arguments: by name. ordinary: launches Triton's own way and returns the compiled kernel."""
        described = self._describe(num_warps, num_stages, arguments) if self._usable and not self._watched() else None
        if described is None:
            ordinary()
            return
        key, device, passed = described
        found = self._compiled.get(key)
        if found is None:
            compiled = ordinary()  # constants of other kinds may compare in their own way: never kept, never found
            if _CONSTANTS.issuperset(map(type, key[1])):
                self._keep(key, compiled)
        elif device == current_device():
            found.start(grid, device, passed)
        else:
            with torch.cuda.device(device):
                found.start(grid, device, passed)

    def _watched(self) -> bool:
        """Whether somebody wants to see launches. A hook is a chain, with nothing in it as a rule, or None."""
        runtime = self._runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        hooks = getattr(enter, "calls", enter), getattr(leave, "calls", leave)
        return bool(self._before or hooks[0] or hooks[1] or runtime.add_stages_inspection_hook)

    def _keep(self, key: tuple[Any, ...], compiled: Any) -> None:
        try:
            self._compiled[key] = _Form(compiled)
        except (AttributeError, KeyError, TypeError, ValueError):
            self._usable = False

    def _describe(
        self, num_warps: int, num_stages: int, arguments: dict[str, Any]
    ) -> tuple[tuple[Any, ...], int, list[Any]] | None:
        """What the compiled form depends on, the device, and the values by place with addresses for tensors.

        The key's second part is the constants. None where the rest is not known: an argument of another kind, or left
        to its default, or in the host's memory.
        """
        if len(arguments) != self._count:
            return None
        values = self._values(arguments)
        constants = self._constants(values)
        kinds = tuple([value.__class__ for value in values])  # 1, 1.0 and True are equal
        if float in kinds:  # and so are 0.0 and -0.0
            constants = tuple([repr(value) if value.__class__ is float else value for value in constants])
        parts: list[Any] = []
        passed, device = list(values), -1
        for place in self._places:
            value, kind = values[place], kinds[place]
            if kind is int:
                if value == 1:
                    parts.append(1)
                elif -0x80000000 <= value < 0x80000000:
                    parts.append(2 if value & 15 else 3)
                elif value < 0x8000000000000000:
                    parts.append(4 if value & 15 else 5)
                else:
                    return None
            elif kind is Tensor or kind is Parameter:
                passed[place] = address = value.data_ptr()
                index = device_index(value)
                parts += value.dtype, address & 15 == 0, index
                if index < 0:
                    return None
                if device < 0:
                    device = index
            elif kind is TensorDescriptor:
                index = device_index(value.base)
                parts += value.base.dtype, tuple(value.block_shape), value.padding, index
                if device < 0:
                    device = index
            elif kind is bool:
                parts.append(value)
            elif kind is not float and value is not None:
                return None
        if device < 0:
            return None
        return (kinds, constants, num_warps, num_stages, *parts), device, passed


def _picker(places: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """The entries at these places, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda entries: tuple([entries[place] for place in places])
