"""Texts and paths of the command line: what typer hands on as it came is looked at here, and refused in one line.

Numbers have their bounds from `qarl.config.limits` beside the option, or from the section of the configuration that
they become a part of.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from qarl.config.check_files import Unusable, look
from qarl.config.messages import shown
from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.inputs.json import json_kind, parse_json
from qarl.inputs.paths import path_fault, shown_path

UsageError: Any = typer.BadParameter.__mro__[1]  # of the click that comes with typer, or of click itself

_LONGEST = 300  # characters of a line about wrong usage


def path_of(place: str, stream: bool = False) -> Callable[[str], Path]:
    """A parser of a path. place: the option or argument, for messages. stream: whether a pipe or device will do."""

    def parse(value: str | Path) -> Path:
        try:
            path, kind = look(str(value))
            if kind == "other" and not stream:
                raise Unusable("is neither a file nor a directory; give another path")
        except Unusable as error:
            raise UserError(f"{place}: '{shown_path(str(value))}': {error}") from None
        return path

    return parse


def name_of(place: str) -> Callable[[str], str]:
    """A parser of a run, checkpoint or model: a path, or a name of the hub or a package, and left as it is."""

    def parse(value: str) -> str:
        if fault := path_fault(value):
            raise UserError(f"{place}: '{shown_path(value)}': {fault}")
        return text_of(place)(value)  # it goes into configurations, which are UTF-8

    return parse


def text_of(place: str) -> Callable[[str], str]:
    """A parser of a text that has to be UTF-8."""

    def parse(value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{place}: is not UTF-8 text at character {error.start + 1:,}; give it as UTF-8") from None
        return value

    return parse


def json_object(text: str | None, place: str) -> dict[str, Any] | None:
    """The JSON object that an option gives, if it is given. Raises UserError, which names `place`."""
    if text is None:
        return None
    try:
        value = parse_json(text, place)
    except Unreadable as error:
        raise UserError(f'{place}: is not JSON ({error.reason}); give an object such as {{"key": true}}') from None
    if not isinstance(value, dict):
        raise UserError(f'{place}: is {json_kind(value)}; give a JSON object such as {{"key": true}}')
    return value


def usage_line(error: Any) -> str:
    """One line about a `UsageError`: the option, what is wrong with it, and where help is."""
    message = error.format_message()
    parameter = getattr(error, "param", None)
    if parameter is not None:
        option = next((name for name in parameter.opts if name.startswith("--")), None)
        place = option or parameter.metavar or str(parameter.name).upper()
        said = re.sub(r"^\w+ should (be|have)", r"must \1", str(error.message).removeprefix("Value error, "))
        said = said or "is required, and not given"
        message = f"{place}: {said}"
    command = error.ctx.command_path if error.ctx is not None else "qarl"
    text = shown(message, _LONGEST).rstrip(".")
    return f"{text if parameter is not None else text[:1].lower() + text[1:]}; see {command} --help"
