"""From a name in `reward.functions` to a callable: a built-in, `path/to/file.py:function` or `package.module:function`.

`check_reference` is cheap and imports nothing; `load_function` imports, so it runs in a worker process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from qarl.errors import UserError
from qarl.inputs.paths import path_errors, user_path
from qarl.rewards.builtin import BUILTINS

# f(completions, prompts, columns), options bound
RewardFunction = Callable[[list[str], list[str], dict[str, list]], list[float]]


def is_file(module: str) -> bool:
    """Whether the part before the colon names a file, not a module."""
    return module.endswith(".py") or "/" in module


def labels(names: list[str]) -> list[str]:
    """Of each function its name, or the part after the colon; a second one of the same gets `#2`."""
    found: list[str] = []
    for name in names:
        base = name.rpartition(":")[2]
        label, copy = base, 1
        while label in found:
            copy += 1
            label = f"{base}#{copy}"
        found.append(label)
    return found


def check_reference(name: str) -> None:
    """Raises UserError if `name` is no built-in, has no function part, or names a file that is not there."""
    module, _, function = name.rpartition(":")
    if not module:
        if name in BUILTINS:
            return
        close = get_close_matches(name, BUILTINS, n=1)
        raise UserError(
            f"reward.functions: `{name}` is no built-in reward"
            + (f" (did you mean `{close[0]}`?)" if close else "")
            + f"; known are {', '.join(BUILTINS)}; yours is path/to/file.py:function or package.module:function"
        )
    if not function.isidentifier():
        raise UserError(f"reward.functions: `{name}`: after the colon must stand a function's name")
    if is_file(module):
        place = f"reward.functions: `{name}`"
        path = user_path(module, place)
        with path_errors(place):
            if not path.is_file():
                raise UserError(f"{place}: no file `{module}` (working directory {Path.cwd()})")


def load_function(name: str, options: dict[str, Any], columns: Collection[str] | None) -> RewardFunction:
    """The function with its options bound and the columns as one dict: f(completions, prompts, columns).

    columns: names of the data's columns, to check that the function can be called with them; None if not known.
    Raises UserError: not there, does not import, no such function, not callable, wrong signature, unknown option.
    """
    check_reference(name)
    try:
        return _bind(name, _find(BUILTINS.get(name, name)), options, columns)
    except UserError as error:
        raise UserError(f"reward.functions: `{name}`: {error}") from error


def describe(error: BaseException) -> str:
    """One line: the exception, its message, and the line of the user's code it passed first."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # an exception of the user's may fail at that, too
        text = "its message cannot be shown"
    ours = (str(Path(__file__).parent), "<frozen", importlib.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    where = f" ({Path(frames[0].filename).name}:{frames[0].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def _find(reference: str) -> Callable[..., Any]:
    module_name, _, attribute = reference.rpartition(":")
    try:
        module = _import_file(Path(module_name)) if is_file(module_name) else _import_module(module_name)
        function = getattr(module, attribute, None)
    except UserError:
        raise
    except BaseException as error:  # whatever the user's module does while it is imported, SystemExit too
        raise UserError(f"does not import: {describe(error)}") from error
    if function is None:
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise UserError(f"there is no `{attribute}` in it; its functions: {', '.join(functions) or 'none'}")
    if not callable(function):
        raise UserError(f"`{attribute}` is {type(function).__name__}, not a function")
    return function


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script's path lacks the directory the user stands in
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # two files may share a stem
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it can import its neighbours, as a script can
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError("a reward file must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # as `import` does: half a module must not be found the next time
        raise
    return module


def _bind(
    name: str, function: Callable[..., Any], options: dict[str, Any], columns: Collection[str] | None
) -> RewardFunction:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # as of functions written in C
        raise UserError("does not say its arguments, must be f(completions, prompts, **columns)") from error
    parameters = signature.parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise UserError(f"takes {signature}, must be f(completions, prompts, **columns)")
    if name in BUILTINS:
        return _bind_builtin(function, options, columns)
    try:
        if columns is None:
            signature.bind_partial(completions=[], prompts=[], **options)
        else:
            given = {**dict.fromkeys([*columns, "completion_ids"]), **options}
            signature.bind(completions=[], prompts=[], **given)
    except TypeError as error:
        known = "" if columns is None else f"; data columns: {', '.join(sorted(columns)) or 'none'}"
        raise UserError(f"cannot be called: {error}; it takes {signature}{known}") from error
    return functools.partial(_call, function, options, frozenset())


def _bind_builtin(
    function: Callable[..., Any], options: dict[str, Any], columns: Collection[str] | None
) -> RewardFunction:
    """Ours have their options as keyword-only parameters, and validate them and their column on an empty batch."""
    known = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    if unknown := sorted(set(options) - set(known)):
        raise UserError(f"unknown option `{unknown[0]}`; it takes {', '.join(known) or 'none'}")
    if missing := [name for name, value in known.items() if value is inspect.Parameter.empty and name not in options]:
        raise UserError(f"needs the option `{missing[0]}`")
    # An option's name is never a column, so that a data column called `group` cannot become the option.
    bound = functools.partial(_call, function, options, frozenset(known))
    if columns is None:  # suppose the one it reads
        columns = [options.get("column", known["column"])] if "column" in known else []
    try:
        bound([], [], {column: [] for column in [*columns, "completion_ids"]})
    except TypeError as error:
        raise UserError(f"an option has the wrong type: {error}") from error
    return bound


def _call(
    function: Callable[..., Any],
    options: dict[str, Any],
    hidden: frozenset[str],
    completions: list[str],
    prompts: list[str],
    columns: dict[str, list],
) -> list[float]:
    given = {name: values for name, values in columns.items() if name not in hidden}
    return function(completions=completions, prompts=prompts, **{**given, **options})
