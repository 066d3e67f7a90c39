"""Functions that launch kernels, remembered: what they do the second time, without working it out again.

Checks of arguments, tiles, grids and the compiled kernel follow from shapes, strides, dtypes and numbers alone, and a
decoder has the same ones in every layer. `planned` keeps what a function launched for them: a plan, which allocates
the results and starts the kernels on other addresses. A plan launches what the function would, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from operator import itemgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from qarl_kernels import direct, launch
from qarl_kernels.direct import Descriptor, Launched, watched, written_out

KEPT_PLANS = 1024  # at most, of one function: rows follow the batch; a kilobyte each
STREAM = 3  # its place among what starts a kernel, after the grid
_NUMBERS = frozenset({bool, int, float, str, type(None), torch.dtype})

P = ParamSpec("P")
R = TypeVar("R")


def planned(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which is asked once for each kind of arguments, and replayed by a plan from then on.

    It may only launch kernels (`qarl_kernels.launch`), on its arguments and on what it returns: None, a tensor, or
    several tensors or None as a tuple, each an argument itself or new and contiguous. It may look at tensors' dtype,
    device, shape, strides and whether their address is a multiple of 16, and at values of its other arguments. What
    does not keep to the first rule (say, copies an argument) is simply run every time; who does something else must
    say so (`unplanned`). So is what has other arguments than tensors, numbers, strings and dtypes.
    """
    # By the arguments' names and classes: what reads such arguments, and the plans by what it read; None: no plans.
    known: dict[tuple[str | type, ...], tuple[Callable[..., Any], dict[Any, _Plan]] | None] = {}

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if launch.INTERPRETED or launch.collecting() or direct.watcher.launches is not None:
            return function(*args, **kwargs)
        values = (*args, *kwargs.values()) if kwargs else args
        kinds = (*kwargs, *map(type, values))
        if kinds not in known:
            read = _reader(kinds[len(kwargs) :])
            known[kinds] = None if read is None else (read, {})
        found = known[kinds]
        if found is None:
            return function(*args, **kwargs)
        read, plans = found
        key, tensors, addresses = read(values)
        plan = plans.get(key)
        if plan is not None and plan.ready():
            return plan.replay(tensors, addresses)
        with watched() as launches:
            result = function(*args, **kwargs)
        if (plan := _plan_of(launches, tensors, result)) is not None:
            if len(plans) == KEPT_PLANS:
                plans.clear()
            plans[key] = plan
        return result

    return run


def unplanned() -> None:
    """What a function does that no plan can repeat, inside a planned one."""
    if direct.watcher.launches is not None:
        direct.watcher.launches.append(None)


def _reader(kinds: Sequence[type]) -> Callable[..., Any] | None:
    """A function of values of these classes: what a plan depends on, the tensors among them, and their addresses.

    None where there is no plan for such values. It is written out for the classes, as `direct` does it.
    """
    key, tensors, lines = [], [], []
    for place, kind in enumerate(kinds):
        name = f"a{place}"
        if kind is Tensor or kind is Parameter:
            tensors.append(place)
            lines.append(f"p{place} = {name}.data_ptr()")
            key += f"{name}.dtype", f"{name}.shape", f"{name}.stride()", f"p{place} & 15 == 0"
            key.append(f"direct.device_index({name})")
        elif kind in _NUMBERS:
            key.append(f"{name} or repr({name})" if kind is float else name)  # 0.0 and -0.0 are equal
        else:
            return None
    if not tensors:
        return None
    lines.append(
        f"return ({', '.join(key)},), [{', '.join(f'a{n}' for n in tensors)}], [{', '.join(f'p{n}' for n in tensors)}]"
    )
    return written_out("values", len(kinds), lines, globals())


class _Step:
    """A launch with everything but the stream and addresses filled in. places: of each tensor in a plan's list."""

    def __init__(self, launched: Launched, places: dict[int, int]) -> None:
        form = launched.form
        self.kernel = launched.kernel
        x, y, z = (*launched.grid, 1, 1)[:3]
        before = x, y, z, 0, form.function, *form.head
        self._call, self._passed = form.call, [*before, *launched.values]
        self._addresses, self._descriptors = [], []
        for place, value in enumerate(launched.values, len(before)):
            if isinstance(value, Tensor):
                self._addresses.append((place, places[id(value)]))
                self._passed[place] = 0  # or the plan would keep the tensor
        for one in form.encoded:
            place = len(before) + one.place
            base, block = self._passed[place].base, self._passed[place].block_shape
            self._descriptors.append((place, places[id(base)], one, one.of_layout(base), block))
            self._passed[place] = 0

    def start(self, stream: int, tensors: Sequence[Tensor], addresses: Sequence[int]) -> None:
        passed = self._passed.copy()
        passed[STREAM] = stream
        for place, which in self._addresses:
            passed[place] = addresses[which]
        for place, which, one, known, block in self._descriptors:
            address = addresses[which]
            arguments = known.get(address) or one.encode(Descriptor(tensors[which], block), address, known)
            passed[place : place + 1] = arguments
        self._call(*passed)


class _Plan:
    """What a function does with tensors of one kind.

    steps: its launches. made: shape, strides and dtype of each new tensor that it returns. returned: from all tensors,
    those given before those made, and None after them, to the result. one: tensor on the device of all.
    """

    def __init__(
        self, steps: list[_Step], made: list[Tensor], returned: Callable[[Sequence[Any]], Any], one: Tensor
    ) -> None:
        self._steps, self._returned = steps, returned
        self._device, self._index = one.device, direct.device_index(one)
        self._made = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in made]

    def ready(self) -> bool:
        """Whether its launches go the direct way now."""
        for step in self._steps:
            if step.kernel.hooked():
                return False
        return self._index == direct.current_device()

    def replay(self, tensors: list[Any], addresses: list[int]) -> Any:
        """The function's result. tensors: those among its arguments; addresses: theirs. Both lists are filled up."""
        for shape, strides, dtype in self._made:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
            tensors.append(tensor)
            addresses.append(tensor.data_ptr())
        assert direct.current_stream is not None, "launches went the direct way before"
        stream = direct.current_stream(self._index)
        for step in self._steps:
            step.start(stream, tensors, addresses)
        tensors.append(None)
        return self._returned(tensors)


def _plan_of(launches: Sequence[Launched | None], given: Sequence[Tensor], result: Any) -> _Plan | None:
    """From what a function launched for the tensors `given` and returned; None where that cannot be repeated."""
    results = result if isinstance(result, tuple) else (result,)
    made = [one for one in results if isinstance(one, Tensor) and not any(one is other for other in given)]
    places = {id(tensor): place for place, tensor in enumerate((*given, *made))}
    twice = len(places) < len(given) + len(made)  # a tensor that is two arguments: a launch does not tell them apart
    direct_ones = [one for one in launches if one is not None and _tensors_of(one) <= places.keys()]
    if twice or len(direct_ones) < len(launches) or not all(tensor.is_contiguous() for tensor in made):
        return None
    indices = [-1 if one is None else places[id(one)] for one in results]
    return _Plan([_Step(one, places) for one in direct_ones], made, itemgetter(*indices), given[0])


def _tensors_of(launched: Launched) -> set[int]:
    """Ids of the tensors that it was given."""
    values = (value.base if isinstance(value, Descriptor) else value for value in launched.values)
    return {id(value) for value in values if isinstance(value, Tensor)}
