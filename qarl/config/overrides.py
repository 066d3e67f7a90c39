"""Command-line overrides `key.path=value`, which take precedence over the file."""

from typing import Any

from qarl.config.messages import shown
from qarl.config.yaml_io import parse_yaml
from qarl.errors import UserError
from qarl.utils.text import visible

KeyPath = tuple[str, ...]

_MOST_KEYS = 32  # keys per path; equals yaml_io.DEPTH
_SHOWN = 100  # characters of an override that a message repeats


def apply_overrides(data: dict[str, Any], overrides: list[str]) -> None:
    """Set each override's key in `data` (in place) to its value, read as YAML.

    A number in the path is an index into a list of the file. Missing sections are created; the validation rejects
    unknown keys later.

    Raises:
        UserError: One line per override that cannot be applied.
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
    """The keys that overrides set, so that a fault can be attributed to the command line."""
    return {_path(override) for override in overrides}


def _path(override: str) -> KeyPath:
    return tuple(override.partition("=")[0].strip().split("."))


def _apply(data: dict[str, Any], override: str) -> None:
    place = f"command line: {visible(override if len(override) <= _SHOWN else override[: _SHOWN - 3] + '...')}"
    keys = _path(override)
    if "=" not in override or not all(keys):
        raise UserError(f"{place}: an override is key.path=value, e.g. optim.lr=1e-6")
    if len(keys) > _MOST_KEYS:
        raise UserError(f"{place}: its path has {len(keys):,} keys; at most {_MOST_KEYS} are possible")
    if not "".join(keys).isprintable():
        raise UserError(f"{place}: its path contains characters that no key has; an override is key.path=value")
    value = parse_yaml(override.partition("=")[2], place)
    here: Any = data
    for position, name in enumerate(keys):
        last = position == len(keys) - 1
        at = shown(".".join(keys[:position]))
        step: str | int = name
        if isinstance(here, list):
            index = _index(name)
            if index is None or index >= len(here):
                valid = f"0 to {len(here) - 1}" if here else "none: it is empty"
                raise UserError(f"{place}: {at} is a list; valid indices are {valid}")
            step = index
        elif not isinstance(here, dict):
            raise UserError(f"{place}: {at} = {shown(repr(here))} has no keys below it; override {at} itself")
        elif not last and here.get(name) is None:
            if _index(keys[position + 1]) is not None:
                at = shown(".".join(keys[: position + 1]))
                raise UserError(f"{place}: the file gives no list {at}; give the whole list, {at}=[...]")
            here[name] = {}
        if last:
            here[step] = value
        else:
            here = here[step]


def _index(name: str) -> int | None:
    """`name` as a list index, if it is a canonical decimal number; otherwise None."""
    return int(name) if name.isascii() and name.isdigit() and len(name) <= 9 and name == str(int(name)) else None
