"""`key.path=value` on the command line: the last word on any key of the file."""

from __future__ import annotations

from typing import Any

from qarl.config.yaml_io import parse_yaml
from qarl.errors import UserError

KeyPath = tuple[str | int, ...]


def apply_overrides(data: dict[str, Any], overrides: list[str]) -> None:
    """Set each override's key in `data` (in place) to its value, read as YAML.

    A number in the path is an index into a list that the file gives. Missing sections are created; whether a key
    exists at all is for the validation to say.
    Raises UserError, one line for each override that cannot be applied.
    """
    faults = []
    for override in overrides:
        try:
            _apply(data, override)
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("\n".join(faults))


def override_keys(overrides: list[str]) -> set[KeyPath]:
    """The keys that overrides set, list indices as int: to say of a fault that the command line made it."""
    return {
        tuple(int(name) if name.isdecimal() else name for name in override.partition("=")[0].strip().split("."))
        for override in overrides
    }


def _apply(data: dict[str, Any], override: str) -> None:
    place = f"command line: {override}"
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"{place}: an override is key.path=value, e.g. optim.lr=1e-6")
    value = parse_yaml(text, place)
    path: list[str | int] = []
    here: Any = data
    for position, name in enumerate(keys):
        last = position == len(keys) - 1
        step: str | int = name
        if isinstance(here, list):
            if not name.isdecimal() or int(name) >= len(here):
                valid = f"0 to {len(here) - 1}" if here else "none: it is empty"
                raise UserError(f"{place}: {'.'.join(map(str, path))} is a list; valid indices are {valid}")
            step = int(name)
        elif not isinstance(here, dict):
            at = ".".join(map(str, path))
            raise UserError(f"{place}: {at} = {here!r} has no keys below it; override {at} itself")
        elif not last and here.get(name) is None:
            if keys[position + 1].isdecimal():
                at = ".".join(keys[: position + 1])
                raise UserError(f"{place}: the file gives no list {at}; give the whole list, {at}=[...]")
            here[name] = {}
        path.append(step)
        if last:
            here[step] = value
        else:
            here = here[step]
