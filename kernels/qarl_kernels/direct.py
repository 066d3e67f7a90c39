"""Launches of kernels that Triton has compiled already, past its binder.

`kernel[grid](...)` binds and specialises its arguments, prints the options, walks hooks and asks the driver about every
pointer: tens of microseconds of the host, longer than most of a decoder's kernels run. All of it depends on the
arguments' kinds alone, so the compiled kernel is kept under those, and later launches hand it addresses at once.

What Triton (3.6 and 3.9) specialises on, and what is part of the key here: values and types of constexpr arguments; the
dtype of a tensor and whether its address is a multiple of 16; whether an integer is 1, a multiple of 16, and fits 32
bits; dtype and block of a descriptor; which arguments are None; options; the device. Anything else goes the
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

KEPT_DESCRIPTORS = 4096  # at most, of one argument: their shapes follow the batch; some hundred bytes each
_CONSTANTS = frozenset({bool, int, float, str, type(None), tl.dtype})

device_index = Tensor.get_device  # -1 for the host
current_device = torch.cuda.current_device
# A build of torch without CUDA has none, and comes to no launch.
current_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Descriptor:
    """A tensor as the tensor memory accelerator reads it, in blocks.

    Triton's own object takes ten times as long to make; it is made where Triton sees it, with Triton's checks.
    """

    __slots__ = ("base", "block_shape")

    def __init__(self, base: Tensor, block_shape: tuple[int, ...]) -> None:
        self.base, self.block_shape = base, block_shape

    def made(self) -> TensorDescriptor:
        """Triton's own. Raises AssertionError where no accelerator reads such a tensor."""
        base = self.base
        return TensorDescriptor(base, list(base.shape), list(base.stride()), list(self.block_shape))


def for_triton(value: Any) -> Any:
    """An argument of a kernel as Triton knows it."""
    return value.made() if type(value) is Descriptor else value


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
            self._run(x, y, z, stream, self._function, self._packed, None, None, None, *map(for_triton, passed))
            return
        for place, meta, known in self._described:
            value = passed[place]
            base = value.base
            key = base.data_ptr(), base.shape, base.stride()
            expanded = known.get(key)
            if expanded is None:
                if len(known) == KEPT_DESCRIPTORS:
                    known.clear()
                expanded = known[key] = nvidia.make_tensordesc_arg(value.made(), meta)
            passed[place : place + 1] = expanded
        self._raw(x, y, z, stream, self._function, *self._options, *passed)


class Direct:
    """The compiled forms of one kernel. Where Triton's objects are not as expected, every launch is an ordinary one."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        # By the arguments' classes: what reads such arguments, and the forms by what it read; None: the ordinary way.
        self._plans: dict[tuple[type, ...], tuple[Callable[..., Any], dict[Any, _Form]] | None] = {}
        try:
            names = [parameter.name for parameter in kernel.params]
            self._fixed = [parameter.is_constexpr for parameter in kernel.params]
            self._runtime, self._before = triton.knobs.runtime, kernel.pre_run_hooks
            self._watched()
        except AttributeError:
            self._usable = False
            return
        self._usable = current_stream is not None
        self._count = len(names)
        self._values = itemgetter(*names) if len(names) > 1 else lambda arguments: (arguments[names[0]],)

    def launch(
        self,
        grid: tuple[int, ...],
        num_warps: int,
        num_stages: int,
        arguments: dict[str, Any],
        ordinary: Callable[[], Any],
    ) -> None:
        """Run over grid. arguments: by name. ordinary: launches Triton's own way and returns the compiled kernel.

        Ordinary is what has an argument of another kind, or left to its default, or in the host's memory.
        """
        if not self._usable or self._watched() or len(arguments) != self._count:
            ordinary()
            return
        values = self._values(arguments)
        kinds = tuple(map(type, values))
        if kinds not in self._plans:
            read = _reader(kinds, self._fixed)
            self._plans[kinds] = None if read is None else (read, {})
        plan = self._plans[kinds]
        described = None if plan is None else plan[0](values, num_warps, num_stages)
        if plan is None or described is None:
            ordinary()
            return
        key, device, passed = described
        found = plan[1].get(key)
        if found is None:
            self._keep(plan[1], key, ordinary())
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

    def _keep(self, forms: dict[Any, _Form], key: tuple[Any, ...], compiled: Any) -> None:
        try:
            forms[key] = _Form(compiled)
        except (AttributeError, KeyError, TypeError, ValueError):
            self._usable = False


def _reader(kinds: Sequence[type], fixed: Sequence[bool]) -> Callable[..., Any] | None:
    """A function of (values, num_warps, num_stages) for values of these classes, by place.

    It returns what the compiled form depends on beside the classes, the device, and the values with addresses for
    tensors; None where a tensor is in the host's memory or on another device than the first, or an integer takes more
    than 64 bits. It is written out for the classes, without a loop: a decoder's layer has ten launches of twenty
    arguments. fixed: which are constexpr. None where a class is not known here.
    """
    key, devices = ["num_warps", "num_stages"], []
    passed, lines, guards = [], [], []
    for place, (kind, constant) in enumerate(zip(kinds, fixed, strict=True)):
        name = f"a{place}"
        passed.append(name)
        if constant:
            if kind not in _CONSTANTS:
                return None
            key.append(f"repr({name})" if kind is float else name)  # 0.0 and -0.0 are equal
        elif kind is int:
            guards.append(f"{-(2**63)} <= {name} < {2**63}")
            narrow = f"{-(2**31)} <= {name} < {2**31}"
            key.append(f"1 if {name} == 1 else (2 if {name} & 15 else 3) + (0 if {narrow} else 2)")
        elif kind is Tensor or kind is Parameter:
            lines.append(f"p{place} = {name}.data_ptr()")
            devices.append(f"device_index({name})")
            key += f"{name}.dtype", f"p{place} & 15 == 0"
            passed[-1] = f"p{place}"
        elif kind is Descriptor:
            devices.append(f"device_index({name}.base)")
            key += f"{name}.base.dtype", f"{name}.block_shape"
        elif kind is bool:
            key.append(name)
        elif kind is not float and kind is not type(None):
            return None
    if not devices:
        return None
    guards += ["device >= 0", *(f"{device} == device" for device in devices[1:])]
    source = [
        "def read(values, num_warps, num_stages):",
        f"    ({', '.join(f'a{place}' for place in range(len(kinds)))},) = values",
        *(f"    {line}" for line in lines),
        f"    device = {devices[0]}",
        f"    if {' and '.join(guards)}:",
        f"        return ({', '.join(key)}, device), device, [{', '.join(passed)}]",
    ]
    found: dict[str, Any] = {}
    exec("\n".join(source), globals(), found)  # of the classes above alone
    return found["read"]
