"""Configurations: damaged YAML, hostile values at the keys of the schema, and values that the schema allows."""

import json
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from config_reference import alternatives, inlined
from fuzzing.base import SHIPPED, config, lay_out
from fuzzing.case import Case
from fuzzing.damage import damage_yaml, edit_record
from fuzzing.values import chance, json_values, listed, pick, position, shown, yaml_values
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

Key = tuple[str | int, ...]


@cache
def schema_keys() -> dict[Key, list[dict[str, Any]]]:
    """Return the JSON schemas of every configuration key; 0 in a key stands for the first entry of a list.

    A key of several objectives has one schema per objective, with the objective's name as `x-name`.
    """
    from qarl.config import Config

    found: dict[Key, list[dict[str, Any]]] = {}
    for path, node in _keys(inlined(Config.model_json_schema()), ()):
        found.setdefault(path, []).append(node)
    return found


def _keys(node: dict[str, Any], path: Key) -> Iterator[tuple[Key, dict[str, Any]]]:
    for option in alternatives(node):
        properties = option.get("properties", {})
        member = properties.get("name", {}).get("const")
        for name, child in properties.items():
            yield (*path, name), child if member is None else {**child, "x-name": member}
            yield from _keys(child, (*path, name))
        if option.get("type") == "array" and isinstance(option.get("items"), dict):
            yield from _keys(option["items"], (*path, 0))


def mutate_config(draw: DrawFn, base: Path, case: Case) -> None:
    """Make a case: `qarl check` of a damaged configuration."""
    lay_out(base, case, "model", "rows.jsonl", "objective.py")
    case.argv = ["check", "c.yaml"]
    if chance(draw, 35):
        shipped = SHIPPED[position(draw, len(SHIPPED))].read_text()
        what, document = damage_yaml(draw, shipped if chance(draw, 60) else yaml.safe_dump(config()))
    else:
        what, document = _changed(draw)
    case.mutation = what
    (case.cwd / "c.yaml").write_bytes(document)


def _changed(draw: DrawFn) -> tuple[str, bytes]:
    """Return a valid configuration with other values for one to three keys. Hostile YAML is inserted literally."""
    data = config()
    if chance(draw, 12):
        what, text = edit_record(draw, data, draw(json_values))
        return what, text.encode()
    snippets: list[str] = []
    changes = []
    for _ in range(pick(draw, (1, 1, 1, 2, 3))):
        path = pick(draw, list(schema_keys()))
        place(data, path, f"@{len(snippets)}@")
        possible = chance(draw, 30) and draw(allowed(pick(draw, schema_keys()[path])))
        snippets.append(json.dumps(possible) if possible is not False else draw(yaml_values))
        name_objective(draw, data, path)
        changes.append(f"{'.'.join(map(str, path))} given {shown(snippets[-1])}")
    text = json.dumps(data)
    for number, snippet in enumerate(snippets):
        text = text.replace(f'"@{number}@"', f"\n {snippet}\n" if snippet.startswith(("#", "%", "-")) else snippet)
    return "; ".join(changes), text.encode("utf-8", "surrogatepass")


def place(data: dict[str, Any], path: Key, value: Any) -> None:
    """Set a key, and create the sections and lists above it; 0 is the first entry of a list."""
    here: Any = data
    for step, following in pairwise(path):
        if isinstance(here, list):
            here[:] = here or [{}]
        elif not isinstance(here.get(step), list if following == 0 else dict):
            here[step] = [] if following == 0 else {}
        here = here[step]
    here[path[-1]] = value


def name_objective(draw: DrawFn, data: dict[str, Any], path: Key) -> None:
    """If a key of an objective was set, choose an objective that has it, because otherwise only that is reported."""
    from qarl.objectives.registry import BY_NAME

    section = data.get("objective")
    if path[0] == "objective" and isinstance(section, dict) and "name" not in section:
        readers = [name for name, one in BY_NAME.items() if set(section) <= set(one.model_fields) - {"path"}]
        section["name"] = pick(draw, readers or ["sapo"])


# Sections with which all valid values train in about a second on any machine, and keys in them that no case changes.
VALID = ("objective", "correction", "optim", "checkpoint", "diagnostics")
LEFT_OUT = listed("""
    objective.path  objective.kwargs  objective.router  objective.teacher  diagnostics.backward_every
    diagnostics.routing_every  checkpoint.resume
""")


@cache
def valid_keys() -> tuple[Key, ...]:
    """Return the keys of `VALID` that contain no sections or lists of sections, except those in `LEFT_OUT`."""
    sections = {path[:length] for path in schema_keys() for length in range(1, len(path))}
    values = [path for path in schema_keys() if path[0] in VALID and path not in sections and 0 not in path]
    return tuple(path for path in values if not ".".join(map(str, path)).startswith(tuple(LEFT_OUT)))


def mutate_nothing(draw: DrawFn, base: Path, case: Case) -> None:
    """Make a case: `qarl check` of a configuration within the schema's ranges."""
    what, data = valid_config(draw)
    case.mutation, case.argv = f"valid: {shown(what, 300)}", ["check", "c.yaml"]
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(data))
    lay_out(base, case, "model", "objective.py")


def valid_config(draw: DrawFn) -> tuple[str, dict[str, Any]]:
    """Return the changes, and a configuration of two steps within the schema's ranges, including their ends.

    Sizes are kept small so that a run takes a second.
    """
    data = config(train={"steps": 2}, data={"max_prompt_length": 96})  # tokens: only the tokenizer counts them
    changes = []
    for _ in range(pick(draw, (1, 1, 2, 3, 5))):
        path = pick(draw, valid_keys())
        node = pick(draw, schema_keys()[path])
        value = draw(allowed(node, small=True))
        place(data, path, value)
        if "x-name" in node:
            place(data, (*path[:-1], "name"), node["x-name"])
        if data.get("objective", {}).get("name") == "custom":
            data["objective"]["path"] = "objective.py:cispo"
        changes.append(f"{'.'.join(map(str, path))} = {value!r}")
    return "; ".join(changes), data


def allowed(node: dict[str, Any], small: bool = False) -> SearchStrategy[Any]:
    """Return values that a key's JSON schema allows, including the ends of its range. small: Only integers near the
    lower end."""
    kind = node.get("type")
    if "anyOf" in node:
        return st.one_of(*(allowed(one, small) for one in node["anyOf"]))
    if "enum" in node or "const" in node:
        return st.sampled_from(node.get("enum") or [node["const"]])
    if kind == "array" and "prefixItems" in node:
        return st.tuples(*map(allowed, node["prefixItems"])).map(list)
    if kind == "array":
        return st.lists(allowed(node["items"], small), max_size=2)
    if kind == "number":
        low, high = node.get("minimum"), node.get("maximum")
        below = {"exclude_min": low is None, "exclude_max": high is None}
        least = node.get("exclusiveMinimum", -1.0) if low is None else low
        return st.floats(least, node.get("exclusiveMaximum", 1e6) if high is None else high, **below)
    if kind == "integer":
        low = int(node.get("minimum", node.get("exclusiveMinimum", -2) + 1))
        high = int(node.get("maximum", node.get("exclusiveMaximum", 2**31) - 1))
        near = st.integers(low, min(low + 5, high))
        return near if small else near | st.just(high)
    return {"boolean": st.booleans(), "string": st.sampled_from(("a", "x y", "\u00e9"))}.get(str(kind), st.none())
