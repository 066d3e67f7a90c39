"""Walk over all fields of the configuration, with their types and bounds."""

import math
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from qarl.config import Config

Leaf = tuple[str, type, dict[str, Any]]


def leaves(annotation: Any, metadata: list[Any], path: str) -> Iterator[Leaf]:
    """Yield (path, int | float | str | list | dict, constraints) of a field and everything below it."""
    bounds = _bounds(metadata)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        for part in annotation.__metadata__:
            metadata = [*metadata, *(part.metadata if isinstance(part, FieldInfo) else [part])]
        yield from leaves(arguments[0], metadata, path)
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            one_of = path == "objective"  # as pydantic's locations have it: the name stands between section and key
            name = f".{argument.model_fields['name'].default}" if one_of else ""
            yield from leaves(argument, metadata, path + name)
    elif origin is list:
        yield path, list, bounds
        yield from leaves(arguments[0], [], f"{path}.[]")
    elif origin is tuple:
        for argument in arguments:
            yield from leaves(argument, [], f"{path}.[]")
    elif origin is dict:
        yield path, dict, bounds
        if arguments[1] is not JsonValue:
            yield from leaves(arguments[1], [], f"{path}.{{}}")
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from leaves(field.annotation, field.metadata, f"{path}.{name}".lstrip("."))
    elif annotation in (int, float, str):
        yield path, annotation, bounds
    else:
        assert origin is Literal or annotation in (bool, type(None), Any), f"{path}: {annotation} is not looked at"


def _bounds(metadata: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in metadata:
        for key in ("ge", "gt", "le", "lt", "min_length", "max_length"):
            if (value := getattr(item, key, None)) is not None:
                found[key] = value
        if isinstance(item, annotated_types.Interval):
            raise AssertionError("an Interval says its bounds elsewhere")
    return found


def plain_numbers() -> list[Leaf]:
    """Return the numeric keys of the configuration that are not inside a list."""
    return [leaf for leaf in leaves(Config, [], "") if leaf[1] in (int, float) and "[]" not in leaf[0]]


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Set a leaf's path to `value`, with the objective named in the path and other keys that it requires."""
    *sections, last = keys_of(path)
    here = data
    for name in sections:
        here = here.setdefault(name, {})
    if sections[0] == "objective":
        objective = data["objective"]
        objective["name"] = path.split(".")[1]
        if objective["name"] == "custom":
            objective.setdefault("path", "own.py:f")
        if sections[1:] == ["teacher"]:
            here.setdefault("path", "a/teacher")
    if "held_out" in sections:
        held_out = data["evaluation"]["held_out"]
        held_out.setdefault("source", "task:arithmetic")
        if "choices" in sections:
            here.setdefault("options", ["a", "b"])
            held_out.setdefault("prompt_template", "{choices}")
    here[last] = value


def keys_of(path: str) -> list[str]:
    """Return the keys of a leaf's path, without the name of an objective."""
    steps = path.split(".")
    return [steps[0], *steps[2:]] if steps[0] == "objective" else steps


def extreme(kind: type, bounds: dict[str, Any], top: bool) -> float | int:
    """Return the largest or smallest value that the bounds accept."""
    inclusive, exclusive = ("le", "lt") if top else ("ge", "gt")
    if inclusive in bounds:
        return kind(bounds[inclusive])
    step = 1 if top else -1
    return bounds[exclusive] - step if kind is int else math.nextafter(bounds[exclusive], -step * math.inf)
