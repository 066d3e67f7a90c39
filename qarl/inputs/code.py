"""User code referenced as `path/to/file.py:name` or `package.module:name`, such as a reward function or an objective.

Importing it runs it; `check_reference` and `qarl.inputs.sources` only read the files.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from qarl.errors import UserError
from qarl.inputs.paths import path_errors, user_path
from qarl.utils.signals import is_stop

REFERENCE = re.compile(r"(?:.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")


def is_file(module: str) -> bool:
    """Whether the part before the colon names a file, not a module."""
    return module.endswith(".py") or "/" in module


def file_of(reference: str) -> str | None:
    """Return the path of the Python file in a reference; None for a module."""
    path = reference.rpartition(":")[0]
    return path if path.endswith(".py") else None


def check_reference(reference: str, place: str) -> None:
    """Raise UserError if `reference` has no name after its colon, or its file does not exist.

    place: Prefix of the message.
    """
    module, _, name = reference.rpartition(":")
    if not name.isidentifier():
        raise UserError(f"{place}: needs a function's name after the colon")
    if is_file(module):
        path = user_path(module, place)
        with path_errors(place):
            if not path.is_file():
                raise UserError(f"{place}: no file `{module}` (working directory {Path.cwd()})")


def find(reference: str) -> Callable[..., Any]:
    """Import the callable that `reference` names: a function, a class, or another callable.

    Raises UserError if the module cannot be imported, or has no callable of that name.
    """
    module_name, _, attribute = reference.rpartition(":")
    try:
        module = _import_file(Path(module_name)) if is_file(module_name) else _import_module(module_name)
        function = getattr(module, attribute, None)
    except UserError:
        raise
    except BaseException as error:  # the user's module may raise anything, including SystemExit
        if is_stop(error):
            raise
        raise UserError(f"does not import: {describe(error)}") from error
    if function is None:
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise UserError(f"there is no `{attribute}` in it; its functions: {', '.join(functions) or 'none'}")
    if not callable(function):
        raise UserError(f"`{attribute}` is {type(function).__name__}, not a function")
    return function


def describe(error: BaseException) -> str:
    """Return one line: the exception, its message, and the line of user code that raised it."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # a user's exception class may raise anything here
        text = "its message cannot be shown"
    ours = (str(Path(__file__).parents[1]) + os.sep, "<frozen", importlib.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    where = f" ({Path(frames[0].filename).name}:{frames[0].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def _import_module(name: str) -> ModuleType:
    with suppress(FileNotFoundError):  # the working directory has been removed
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # a console script's sys.path lacks the working directory
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # two files may share a stem
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it can import files of its directory, like a script
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError("its file must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # as `import` does: a partial module must not be found the next time
        raise
    return module
