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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from threading import local
from typing import Any, NamedTuple

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
# Without a look at whether CUDA has started: who has a tensor there has started it. A build of torch without CUDA has
# neither, and comes to no launch.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
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


class Encoded:
    """What the descriptor at one place of a form's arguments becomes, by its tensor's layout and address."""

    def __init__(self, place: int, meta: Any) -> None:
        self.place, self._meta = place, meta
        self._known: dict[tuple[Sequence[int], Sequence[int]], dict[int, list[Any]]] = {}

    def of_layout(self, tensor: Tensor) -> dict[int, list[Any]]:
        """What is known of tensors of this one's shape and strides, by address."""
        layout = tensor.shape, tensor.stride()
        known = self._known.get(layout)
        if known is None:
            if len(self._known) == KEPT_DESCRIPTORS:
                self._known.clear()
            known = self._known[layout] = {}
        return known

    def encode(self, value: Descriptor, address: int, known: dict[int, list[Any]]) -> list[Any]:
        """The arguments that stand for `value`, whose tensor is at `address`; they are known from then on."""
        if len(known) == KEPT_DESCRIPTORS:
            known.clear()
        arguments = known[address] = nvidia.make_tensordesc_arg(value.made(), self._meta)
        return arguments


class Made:
    """Triton's own descriptors in place of what they become: made anew every time, because they hold their tensor."""

    def __init__(self, place: int) -> None:
        self.place = place

    def of_layout(self, tensor: Tensor) -> dict[int, list[Any]]:
        return {}

    def encode(self, value: Descriptor, address: int, known: dict[int, list[Any]]) -> list[Any]:
        return [value.made()]


class Form:
    """A compiled kernel, ready to start.

    call, head: what starts it with grid, stream, function, `head` and the arguments. encoded: of the descriptors among
    these, from the last place to the first, because what is put in moves the others.
    """

    def __init__(self, compiled: Any, described: Sequence[int]) -> None:
        """described: places of descriptors, ascending."""
        self.call, self.function = compiled.run, compiled.function
        packed = compiled.packed_metadata
        self.head: tuple[Any, ...] = (packed, None, None, None)
        self.encoded: Sequence[Encoded | Made] = [Made(place) for place in reversed(described)]
        # Triton 3.6 encodes every descriptor anew at every launch, in Python. What it would pass is kept here by
        # address and layout, and given to its compiled launcher. Other versions order that launcher's arguments
        # otherwise, and a kernel with scratch memory needs it allocated: those take the way that all versions have.
        launcher = self.call
        if not triton.__version__.startswith("3.6.") or launcher.global_scratch_size or launcher.profile_scratch_size:
            return
        held = inspect.getclosurevars(launcher.launch).nonlocals if inspect.isfunction(launcher.launch) else {}
        if None in (held.get("tensordesc_meta") or ()):
            return  # descriptors that the kernel takes apart, with the tensor itself among their parts
        modes, no_scratch, no_hooks = (launcher.launch_cooperative_grid, launcher.launch_pdl), (None,) * 2, (None,) * 3
        encoded = []
        call = launcher.launch
        if "tensordesc_indices" in held:
            call = held["launcher"]
            places = sorted(held["tensordesc_indices"], reverse=True)
            encoded = [Encoded(*one) for one in zip(places, reversed(held["tensordesc_meta"]), strict=True)]
        self.call, self.head, self.encoded = call, (*modes, *no_scratch, packed, *no_hooks), encoded

    def start(self, grid: tuple[int, ...], device: int, passed: list[Any]) -> None:
        """passed: all arguments by place, constants too, tensors as addresses."""
        assert current_stream is not None
        x, y, z = (*grid, 1, 1)[:3]
        for one in self.encoded:
            value = passed[one.place]
            known, address = one.of_layout(value.base), value.base.data_ptr()
            passed[one.place : one.place + 1] = known.get(address) or one.encode(value, address, known)
        self.call(x, y, z, current_stream(device), self.function, *self.head, *passed)


class Launched(NamedTuple):
    """A launch that somebody watches. form: what ran, or will run next time. values: of its arguments, by place."""

    kernel: Direct
    form: Form
    grid: tuple[int, ...]
    values: tuple[Any, ...]


class _Watcher(local):
    """Of this thread's launches. launches: those so far, None in place of one that went the ordinary way; None: nobody
    watches."""

    launches: list[Launched | None] | None = None


watcher = _Watcher()


@contextmanager
def watched() -> Iterator[list[Launched | None]]:
    """Inside, launches of this thread are told to the list as well."""
    before, watcher.launches = watcher.launches, []
    try:
        yield watcher.launches
    finally:
        watcher.launches = before


class Direct:
    """The compiled forms of one kernel. Where Triton's objects are not as expected, every launch is an ordinary one."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        # By the arguments' classes: what reads such arguments, and the forms by what it read; None: the ordinary way.
        self._plans: dict[tuple[type, ...], tuple[Callable[..., Any], dict[Any, Form]] | None] = {}
        try:
            names = [parameter.name for parameter in kernel.params]
            self._fixed = [parameter.is_constexpr for parameter in kernel.params]
            self._runtime, self._before = triton.knobs.runtime, kernel.pre_run_hooks
            self.hooked()
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
        values: tuple[Any, ...] = ()
        form = None
        if not self._usable or self.hooked() or len(arguments) != self._count:
            ordinary()
        else:
            values = self._values(arguments)
            form = self._start(grid, values, num_warps, num_stages, ordinary)
        if watcher.launches is not None:
            watcher.launches.append(None if form is None else Launched(self, form, grid, values))

    def _start(
        self,
        grid: tuple[int, ...],
        values: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
        ordinary: Callable[[], Any],
    ) -> Form | None:
        """See `launch`. Returns the form that ran, or that will run next time; None: there is none."""
        kinds = tuple(map(type, values))
        if kinds not in self._plans:
            read = _reader(kinds, self._fixed)
            self._plans[kinds] = None if read is None else (read, {})
        plan = self._plans[kinds]
        known = None if plan is None else plan[0](values, num_warps, num_stages)
        if plan is None or known is None:
            ordinary()
            return None
        key, device, passed = known
        found = plan[1].get(key)
        if found is None:
            described = [place for place, kind in enumerate(kinds) if kind is Descriptor]
            return self._keep(plan[1], key, ordinary(), described)
        if device == current_device():
            found.start(grid, device, passed)
        else:
            with torch.cuda.device(device):
                found.start(grid, device, passed)
        return found

    def hooked(self) -> bool:
        """Whether a hook wants to see launches. A hook is a chain, with nothing in it as a rule, or None."""
        runtime = self._runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        hooks = getattr(enter, "calls", enter), getattr(leave, "calls", leave)
        return bool(self._before or hooks[0] or hooks[1] or runtime.add_stages_inspection_hook)

    def _keep(self, forms: dict[Any, Form], key: tuple[Any, ...], compiled: Any, described: list[int]) -> Form | None:
        try:
            form = forms[key] = Form(compiled, described)
        except (AttributeError, KeyError, TypeError, ValueError):
            self._usable = False
            return None
        return form


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
    lines += [
        f"device = {devices[0]}",
        f"if {' and '.join(guards)}:",
        f"    return ({', '.join(key)}, device), device, [{', '.join(passed)}]",
    ]
    return written_out("values, num_warps, num_stages", len(kinds), lines, globals())


def written_out(parameters: str, count: int, lines: Sequence[str], names: dict[str, Any]) -> Callable[..., Any]:
    """A function of these lines, in which a0, a1, ... are the `count` values of its parameter `values`.

    lines: made of what is known here alone, and of nothing that a user gives. names: what else they may use.
    """
    unpacked = f"({', '.join(f'a{place}' for place in range(count))},) = values"
    source = [f"def read({parameters}):", *(f"    {line}" for line in (unpacked, *lines))]
    found: dict[str, Any] = {}
    exec("\n".join(source), names, found)
    return found["read"]
