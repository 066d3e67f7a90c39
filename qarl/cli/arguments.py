"""Parsing of texts and paths on the command line, with one-line errors.

Bounds of numbers come from `qarl.inputs.limits`, next to the option, or from the configuration section that uses them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from qarl.checks.check_files import Unusable, look
from qarl.config.data import TEMPLATE_OPTION
from qarl.config.messages import shown
from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.inputs.json import json_kind, parse_json
from qarl.inputs.paths import path_fault, shown_path

UsageError: Any = typer.BadParameter.__mro__[1]  # from typer's bundled click, or from click itself

_LONGEST = 300  # longest usage error, in characters


def path_of(place: str, stream: bool = False) -> Callable[[str], Path]:
    """Return a parser of a path.

    Args:
        place: Option or argument, for messages.
        stream: Whether pipes and devices are accepted.
    """

    def parse(value: str | Path) -> Path:
        try:
            path, kind = look(str(value))
            if kind == "other" and not stream:
                raise Unusable("is neither a file nor a directory; give another path")
        except Unusable as error:
            raise UserError(f"{place}: '{shown_path(str(value))}': {error}") from None
        return path

    return parse


def text_of(place: str) -> Callable[[str], str]:
    """Return a parser of UTF-8 text. place: as for `path_of`."""

    def parse(value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{place}: is not UTF-8 text at character {error.start + 1:,}; give it as UTF-8") from None
        return value

    return parse


def name_of(place: str) -> Callable[[str], str]:
    """Return a parser of a run, checkpoint or model: a path, or a name on the hub or in a package."""

    def parse(value: str) -> str:
        if fault := path_fault(value):
            raise UserError(f"{place}: '{shown_path(value)}': {fault}")
        return text_of(place)(value)  # it is written to configurations, which are UTF-8

    return parse


stream_of = partial(path_of, stream=True)


def option(name: str, metavar: str, help: str, parser_of: Callable[[str], Callable[[str], Any]] = text_of) -> Any:
    """Return the typer option `name`, whose value `parser_of(name)` parses."""
    return typer.Option(name, parser=parser_of(name), metavar=metavar, help=help)


def argument(metavar: str, help: str, parser_of: Callable[[str], Callable[[str], Any]] = path_of) -> Any:
    """Like `option`, for a positional argument. metavar: in brackets if it may be left out."""
    return typer.Argument(parser=parser_of(metavar.strip("[]")), metavar=metavar, help=help)


def template_object(text: str | None) -> dict[str, Any] | None:
    """Parse the JSON object in --chat-template-kwargs; None if the option is not given. Raises UserError."""
    if text is None:
        return None
    try:
        value = parse_json(text, TEMPLATE_OPTION)
    except Unreadable as error:
        raise UserError(
            f'{TEMPLATE_OPTION}: is not JSON ({error.reason}); give an object such as {{"key": true}}'
        ) from None
    if not isinstance(value, dict):
        raise UserError(f'{TEMPLATE_OPTION}: is {json_kind(value)}; give a JSON object such as {{"key": true}}')
    return value


def usage_line(error: Any) -> str:
    """Format a `UsageError` in one line: the option, the problem, and how to get help."""
    message = error.format_message()
    parameter = getattr(error, "param", None)
    if parameter is not None:
        option = next((name for name in parameter.opts if name.startswith("--")), None)
        place = option or parameter.metavar or str(parameter.name).upper()
        problem = re.sub(r"^\w+ should (be|have)", r"must \1", str(error.message).removeprefix("Value error, "))
        problem = problem or "is required"
        message = f"{place}: {problem}"
    command = error.ctx.command_path if error.ctx is not None else "qarl"
    text = shown(message, _LONGEST).rstrip(".")
    return f"{text if parameter is not None else text[:1].lower() + text[1:]}; see {command} --help"
