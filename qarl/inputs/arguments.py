"""Check the arguments of a Python function against its annotations, as the command line does by parsing."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from qarl.errors import UserError
from qarl.utils.text import shortened, visible

P = ParamSpec("P")
R = TypeVar("R")
_SHOWN = 80  # characters of a value in a message


def checked_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function` so that an argument of the wrong type raises UserError.

    Otherwise some mistakes would go unnoticed: the string "END" is also a sequence of three strings. Arrays, columns of
    datasets and other iterables become lists.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = get_type_hints(function)
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            bound.arguments[name] = value = _plain(value)
            try:
                TypeAdapter(hints[name], config=ConfigDict(strict=True)).validate_python(value)
            except ValidationError as error:
                shown = shortened(visible(repr(value)), _SHOWN)
                raise UserError(f"{name} = {shown}: must be {_described(hints[name])}") from error
        return function(*bound.args, **bound.kwargs)

    return call


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and scalars of numpy, series of pandas
        return value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, os.PathLike, BaseModel)):
        return [_plain(each) for each in value]
    return value


def _described(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_described, get_args(hint)))
    if hint is type(None):
        return "None"
    if get_args(hint):
        return str(hint).replace("collections.abc.", "").replace("typing.", "").replace("os.", "")
    return hint.__name__
