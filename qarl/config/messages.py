"""Validate a section; an error has one line per fault: place, key, given value, and valid values."""

import difflib
import re
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from qarl.errors import UserError
from qarl.inputs.json import short_json
from qarl.utils.text import shortened

Loc = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)

MOST_LINES = 20  # a list with a thousand wrong entries needs no line for each


def validated(model: type[M], data: dict[str, Any], place: Callable[[Loc], str]) -> M:
    """Validate `data` as a section.

    Args:
        model: The section.
        data: The parsed YAML.
        place: Returns where the value of a key was given (file or command line), for messages.

    Raises:
        UserError: One line per fault, at most MOST_LINES and a line with the number of further ones.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [f"{place(loc)}: {line}" for loc, line in _lines(error, model, data)]
        raise UserError("\n".join(capped(lines, place(())))) from None


def capped(lines: list[str], place: str) -> list[str]:
    """The first MOST_LINES of `lines`, plus a line with the number of further ones."""
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"{place}: and {more:,} more faults"]


def fault_line(loc: Loc, value: Any, text: str) -> str:
    """`key.path = value: text`, the value shortened to fit a line."""
    return f"{_key(loc) or 'top level'} = {short_json(value)}: {text}"


def shown(text: str, limit: int = 60) -> str:
    """`text` on one line, cut to `limit` characters."""
    return shortened(" ".join(text.split()), limit)


def _key(loc: Loc) -> str:
    return shown(".".join(map(str, loc)), 120)


def _lines(error: ValidationError, root: type[BaseModel], data: dict[str, Any]) -> Iterator[tuple[Loc, str]]:
    for item in error.errors(include_url=False):
        steps: Loc = item["loc"]
        loc = _untagged(root, steps)
        match item["type"]:
            case "refused":
                for fault in item["ctx"]["faults"]:
                    yield (*loc, *fault.key), fault_line((*loc, *fault.key), fault.value, fault.text)
            case "missing":
                section = _strip(_annotation(root, steps[:-1]))
                if get_origin(section) is tuple:
                    yield loc[:-1], f"{_key(loc[:-1])}: must be a list of {len(get_args(section))}"
                    continue
                description = section.model_fields[str(loc[-1])].description
                yield loc, f"{_key(loc)}: required, and not given. {description}"
            case "extra_forbidden":
                yield loc, fault_line(loc, item["input"], _unknown_key(root, steps))
            case _:
                text = _valid(item, _annotation(root, steps))
                loc = _keys_only(loc, data)
                yield loc, fault_line(loc, item["input"], text)


def _keys_only(loc: Loc, data: Any) -> Loc:
    """Remove the parts of `loc` that are not keys of `data`: in free mappings pydantic adds the types it tried."""
    keys: list[str | int] = []
    step: Any
    for step in loc:
        if (isinstance(data, dict) and step in data) or (isinstance(data, list) and isinstance(step, int)):
            keys.append(step)
            data = data[step]
    return tuple(keys)


def _valid(item: ErrorDetails, annotation: Any) -> str:
    text = re.sub(r"^\w+ should (be|have)", r"must \1", item["msg"])
    text = re.sub(r" after validation, not \d+$", "", text)
    if "dictionary" in text:
        text = "must be a mapping of keys"
    elif "tuple" in text:
        text = f"must be a list of {len(get_args(annotation))}"
    else:
        text = text.replace("a valid boolean", "true or false").replace("a valid integer", "an integer")
        text = text.replace("a valid ", "a ")
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        near = difflib.get_close_matches(item["input"], re.findall("'([^']*)'", item["ctx"]["expected"]), n=1)
        text += f"; did you mean {near[0]}?" if near else ""
    return text + (" (or null)" if type(None) in get_args(annotation) else "")


def _unknown_key(root: type[BaseModel], steps: Loc) -> str:
    section, loc = _strip(_annotation(root, steps[:-1])), _untagged(root, steps)
    assert isinstance(section, type) and issubclass(section, BaseModel), f"unknown key below {section}"
    key = str(loc[-1])
    near = difflib.get_close_matches(key, section.model_fields, n=1)
    if near:
        return f"unknown key; did you mean {'.'.join(map(str, (*loc[:-1], near[0])))}?"
    elsewhere = list(dict.fromkeys(".".join(path) for path in _all_keys(root) if path[-1] == key))
    if elsewhere:
        return f"unknown key; did you mean {' or '.join(elsewhere)}?"
    return f"unknown key; valid keys here: {', '.join(section.model_fields)}"


def _all_keys(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for inner in _members(field.annotation).values() or [_strip(field.annotation)]:
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _all_keys(inner, (*prefix, name))


def _members(annotation: Any) -> dict[str, type[BaseModel]]:
    """The sections of a union discriminated by `name`, by name; {} for any other type."""
    arguments = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()
    if not arguments or not all(isinstance(part, type) and issubclass(part, BaseModel) for part in arguments):
        return {}
    return {part.model_fields["name"].default: part for part in arguments}


def _untagged(root: type[BaseModel], steps: Loc) -> Loc:
    """Remove the union tags from `steps`: pydantic lists the name of a union's section as if it were a key."""
    return tuple(step for end, step in enumerate(steps) if step not in _members(_annotation(root, steps[:end])))


def _annotation(root: type[BaseModel], steps: Loc) -> Any:
    """The type at `steps`, including None if the last key is optional; Any if the path leaves the models."""
    current: Any = root
    for step in steps:
        if step in (members := _members(current)):
            current = members[step]
            continue
        current = _strip(current)
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(step))
            current = field.annotation if field else Any
        elif get_origin(current) is list:
            current = get_args(current)[0]
        else:
            return Any
    return _strip_annotated(current)


def _strip_annotated(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _strip(annotation: Any) -> Any:
    """`X` of `X | None` and of `Annotated[X, ...]`."""
    annotation = _strip_annotated(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [arg for arg in get_args(annotation) if arg is not type(None)]
        return _strip(rest[0]) if len(rest) == 1 else annotation
    return annotation
