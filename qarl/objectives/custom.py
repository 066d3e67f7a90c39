"""A user's own objective: `objective.path: path/to/file.py:name`, with the interface of the built-in ones.

    def name(inputs: SurrogateInputs, **kwargs) -> Surrogate

or a class. A class is instantiated once per run with the kwargs, and the instance is called with the inputs. Ratio,
advantages, correction, vocabulary pruning, penalties and aggregation are keys of the section, as for every objective.
Example: `examples/custom_objective.py`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import JsonValue

from qarl.errors import UserError, is_out_of_memory
from qarl.inputs.code import REFERENCE, check_reference, describe, file_of, find
from qarl.inputs.paths import PATH_BYTES
from qarl.inputs.section import Fault, Field, path_faults
from qarl.inputs.sources import source_parts
from qarl.objectives.base import RatioObjective, SurrogateFunction
from qarl.objectives.common import RATIO_STATS, Surrogate, SurrogateInputs
from qarl.utils.signals import is_stop

_STATISTIC = re.compile(r"objective/[A-Za-z0-9_]+")


class Custom(RatioObjective):
    """A user's function or class."""

    name: Literal["custom"] = Field("custom", description="Your own function or class, at `path`.")
    path: str = Field(
        min_length=1,
        max_length=PATH_BYTES,
        description="path/to/file.py:name, or package.module:name, of name(inputs, **kwargs) -> Surrogate, or of a "
        "class that is instantiated with kwargs and called with inputs.",
    )
    kwargs: dict[str, JsonValue] = Field({}, description="Keyword arguments of the function, or of the class.")

    idle_at_zero: ClassVar[bool] = False  # a response with advantage 0 may have a value

    @property
    def file(self) -> str | None:
        """Path of the Python file, for `file.py:name`; else None."""
        return file_of(self.path)

    def bind(self) -> SurrogateFunction:
        """Import the user's function. Raises UserError if that fails, or if it cannot be called with `kwargs`."""
        place = _place(self.path)
        check_reference(self.path, place)
        try:
            function = _bound(find(self.path), self.kwargs)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        return partial(_checked, place, function)

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        return self.bind()(inputs)

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the function's name, kwargs and source, by name. Raises UserError for an unreadable file."""
        name = self.path.rpartition(":")[2]
        parts = [name, self.kwargs, *source_parts(self.path, _place(self.path))]
        return {name: hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()}

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from path_faults("path", self.file)
        if not REFERENCE.fullmatch(self.path):
            yield self.fault("path", "must be path/to/file.py:name, or package.module:name")


def _place(reference: str) -> str:
    return f"objective.path: `{reference}`"


def _checked(place: str, function: Callable[[SurrogateInputs], Any], inputs: SurrogateInputs) -> Surrogate:
    """Call the function. Raises UserError if it raises or returns anything but a surrogate of these tokens."""
    try:
        result = function(inputs)
    except BaseException as error:
        if is_stop(error) or is_out_of_memory(error):  # both are reported elsewhere
            raise
        raise UserError(f"{place}: raised {describe(error)}") from error
    if fault := _fault(result, inputs):
        raise UserError(f"{place}: {fault}")
    return result


def _bound(function: Callable[..., Any], kwargs: dict[str, Any]) -> Callable[[SurrogateInputs], Any]:
    """Return a function of the inputs alone: `function` with kwargs bound, or an instance of the class.

    Raises UserError if the arguments do not fit, or the class cannot be instantiated.
    """
    if isinstance(function, type):
        _check_call(function, (), kwargs)
        try:
            function = function(**kwargs)
        except BaseException as error:
            if is_stop(error):
                raise
            raise UserError(f"cannot be instantiated: {describe(error)}") from error
        if not callable(function):
            raise UserError("its instances cannot be called; it needs __call__(self, inputs)")
        kwargs = {}
    _check_call(function, (None,), kwargs)
    return partial(function, **kwargs)


def _check_call(function: Callable[..., Any], arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise UserError if the signature does not take these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # for example a function written in C
        raise UserError("has no readable signature; must be f(inputs, **kwargs)") from error
    try:
        signature.bind(*arguments, **kwargs)
    except TypeError as error:
        what = "inputs and objective.kwargs" if arguments else "objective.kwargs"
        raise UserError(f"cannot be called with {what}: {error}; it takes {signature}") from error


def _fault(result: Any, inputs: SurrogateInputs) -> str | None:
    """Explain why the result is not a surrogate of these tokens; None if it is."""
    import torch

    if not isinstance(result, Surrogate):
        return f"returned {type(result).__name__}, must be a qarl.objectives.Surrogate(value, stats)"
    value, logp = result.value, inputs.logps.logp
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        kind = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        return f"its value is {kind}, must be a tensor of floats"
    if value.shape != logp.shape:
        return f"its value has shape {list(value.shape)}, must be {list(logp.shape)}: one number per token"
    if value.device != logp.device:
        return f"its value is on {value.device}, and the log-probs are on {logp.device}"
    if torch.is_grad_enabled() and logp.requires_grad and not value.requires_grad:
        return "its value has no gradient; compute it from inputs.log_ratio or inputs.logps.logp, without detach"
    if fault := _infinite(value.detach(), inputs):
        return fault
    if not isinstance(result.stats, dict):
        return f"its stats are {type(result.stats).__name__}, must be a dict"
    for name, number in result.stats.items():
        if name not in RATIO_STATS and not (isinstance(name, str) and _STATISTIC.fullmatch(name)):
            return f"statistic {name!r:.80}: must be named objective/NAME, or come from ratio_stats"
        if not isinstance(number, torch.Tensor) or number.shape != (2,) or number.dtype != torch.float64:
            return f"statistic {name!r:.80}: must be made by qarl.objectives.stat(values, mask)"
    return None


def _infinite(value: Any, inputs: SurrogateInputs) -> str | None:
    """Describe the first token with a NaN or infinite value if all log-probs are finite. Synchronizes with the GPU.

    A non-finite log-prob is the learner's fault: the value has to reach the learner, which skips the step.
    """
    import torch

    logps = inputs.logps
    columns = (logps.logp, logps.logp_old, logps.logp_sampler, inputs.log_ratio)
    inputs_finite = torch.stack([column.isfinite().all() for column in columns]).all()
    if not inputs_finite & ~value.isfinite().all():
        return None
    at = int((~value.isfinite()).int().argmax())
    response = int(inputs.segments.index[at])
    return (
        f"its value is {float(value[at])} at a token of advantage {float(inputs.advantages[response]):.4g} and "
        f"log_ratio {float(inputs.log_ratio.detach()[at]):.4g}; ratios are safe with clamped_exp"
    )
