"""Resolve a name in `reward.functions`: a built-in, `path/to/file.py:function` or `package.module:function`.

`load_function` imports user code, so it runs in a worker process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, get_type_hints

from qarl.errors import UserError
from qarl.inputs import code

BUILTINS = {
    "choice": "qarl.rewards.builtin:choice",
    "code": "qarl.rewards.programs:code",
    "exact": "qarl.rewards.builtin:exact",
    "format": "qarl.rewards.builtin:format",
    "length": "qarl.rewards.builtin:length",
    "overlong": "qarl.rewards.builtin:overlong",
    "math": "qarl.rewards.mathematics:math",
    "reasoning_gym": "qarl.rewards.reasoning:reasoning_gym",
    "regex": "qarl.rewards.builtin:regex",
}

# f(completions, prompts, columns), options bound
RewardFunction = Callable[[list[str], list[str], dict[str, list]], list[float | None]]


def labels(names: list[str]) -> list[str]:
    """Return the label of each function: its name, or the part after the colon, with `#2` for a duplicate."""
    found: list[str] = []
    for name in names:
        base = name.rpartition(":")[2]
        label, copy = base, 1
        while label in found:
            copy += 1
            label = f"{base}#{copy}"
        found.append(label)
    return found


def load_function(name: str, options: dict[str, Any], columns: Collection[str]) -> RewardFunction:
    """Load a function and bind its options.

    Args:
        name: Name in `reward.functions`.
        options: Options of the function.
        columns: Names of the data columns, to check that the function accepts them.

    Returns:
        A callable `f(completions, prompts, columns)`.

    Raises:
        UserError: The function is missing, cannot be imported or called, or does not accept an option or column.
    """
    try:
        return _bind(name, code.find(BUILTINS.get(name, name)), options, columns)
    except UserError as error:
        raise UserError(f"reward.functions: `{name}`: {error}") from error


def _bind(name: str, function: Callable[..., Any], options: dict[str, Any], columns: Collection[str]) -> RewardFunction:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # such as functions written in C
        raise UserError("has no readable signature; it must be f(completions, prompts, **columns)") from error
    parameters = signature.parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise UserError(f"takes {signature}, must be f(completions, prompts, **columns)")
    if name in BUILTINS:
        return _bind_builtin(function, options, columns)
    try:
        given = {**dict.fromkeys([*columns, "completion_ids"]), **options}
        signature.bind(completions=[], prompts=[], **given)
    except TypeError as error:
        known = ", ".join(sorted(columns)) or "none"
        raise UserError(f"cannot be called: {error}; it takes {signature}; data columns: {known}") from error
    return functools.partial(_call, function, options, frozenset())


def _bind_builtin(function: Callable[..., Any], options: dict[str, Any], columns: Collection[str]) -> RewardFunction:
    """Bind a built-in: options are keyword-only parameters, validated by a call with an empty batch."""
    known = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    if unknown := sorted(set(options) - set(known)):
        raise UserError(f"unknown option `{unknown[0]}`; it takes {', '.join(known) or 'none'}")
    if missing := [name for name, value in known.items() if value is inspect.Parameter.empty and name not in options]:
        raise UserError(f"needs the option `{missing[0]}`")
    _check_types(function, options)
    # Option names are hidden from the columns, so a data column called `group` cannot set the option.
    bound = functools.partial(_call, function, options, frozenset(known))
    try:
        bound([], [], {column: [] for column in [*columns, "completion_ids"]})
    except TypeError as error:
        raise UserError(f"an option has the wrong type: {error}") from error
    return bound


def _check_types(function: Callable[..., Any], options: dict[str, Any]) -> None:
    from pydantic import TypeAdapter, ValidationError

    annotations, hints = inspect.get_annotations(function), get_type_hints(function)
    for option, value in options.items():
        try:
            TypeAdapter(hints[option]).validate_python(value, strict=True)
        except ValidationError:
            raise UserError(f"option `{option}` is {value!r:.60}, expected {annotations[option]}") from None


def _call(
    function: Callable[..., Any],
    options: dict[str, Any],
    hidden: frozenset[str],
    completions: list[str],
    prompts: list[str],
    columns: dict[str, list],
) -> list[float | None]:
    given = {name: values for name, values in columns.items() if name not in hidden}
    return function(completions=completions, prompts=prompts, **{**given, **options})
