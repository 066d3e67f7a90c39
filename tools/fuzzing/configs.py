"""Configurations and overrides: damaged YAML, and hostile values and shapes at the keys of the schema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml

from fuzzing.base import Base, lay_out
from fuzzing.case import Case, argument
from fuzzing.documents import damage_yaml
from fuzzing.paths import PATHS, make_traps
from fuzzing.values import TEXTS, shown, yaml_value

Key = tuple[str | int, ...]

# A study whose shared model does not exist: whatever else is read, no member is ever trained.
STUDY: dict[str, Any] = {
    "title": "a study",
    "variants": {"a": {}, "b": {"optim": {"lr": 2e-3}}},
    "profiles": {"gpu": {"train": {"steps": 2}}},
    "columns": [{"head": "reward", "metric": "reward/mean", "over": "last", "at_least": 0.5}],
    "curves": [{"title": "reward", "metric": "reward/mean"}],
}


@cache
def schema_keys() -> tuple[tuple[Key, str], ...]:
    """Every key of the configuration and its JSON type; 0 stands for the first entry of a list."""
    from qarl.config import Config

    schema = Config.model_json_schema()
    return tuple(dict.fromkeys(_keys(schema, schema, ())))


def _keys(root: dict[str, Any], node: dict[str, Any], path: Key) -> Iterator[tuple[Key, str]]:
    while "$ref" in node:
        node = root["$defs"][node["$ref"].rpartition("/")[2]]
    for option in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _keys(root, option, path)
    if "properties" in node:
        for name, child in node["properties"].items():
            yield (*path, name), str(child.get("type", "any"))
            yield from _keys(root, child, (*path, name))
    elif node.get("type") == "array" and isinstance(node.get("items"), dict):
        yield from _keys(root, node["items"], (*path, 0))


def mutate_config(rng: random.Random, base: Base, case: Case) -> None:
    """`qarl check` (now and then `train`) of a configuration with damage, or `qarl compare` of such a study."""
    make_traps(case.cwd)
    lay_out(base, case, "data", "objective")
    roll = rng.random()
    if roll < 0.08:
        study = {**STUDY, "config": base.config(model={"path": "./no-such-model"})}
        case.mutation, document = damage_yaml(rng, yaml.safe_dump(study, sort_keys=False))
        case.mutation = f"study: {case.mutation}"
        case.argv = ["compare", "c.yaml", "--out", "out"]
    elif roll < 0.35:
        shipped = base.shipped[int(rng.random() * len(base.shipped))]
        text = shipped.read_text() if rng.random() < 0.6 else yaml.safe_dump(base.config())
        case.mutation, document = damage_yaml(rng, text)
        case.mutation = f"text: {case.mutation}"
        case.argv = ["check", "c.yaml"]
    else:
        changes, document = _changed(rng, base)
        case.mutation = f"values: {changes}"
        case.argv = ["check", "c.yaml"]
    (case.cwd / "c.yaml").write_bytes(document)


def _changed(rng: random.Random, base: Base) -> tuple[str, bytes]:
    """A valid configuration with one to three keys given something else; hostile YAML goes in as it is."""
    data = base.config()
    snippets: list[str] = []
    changes = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path, _ = schema_keys()[int(rng.random() * len(schema_keys()))]
        if rng.random() < 0.12:
            changes.append(_reshape(rng, data, path))
            continue
        what, snippet = yaml_value(rng)
        snippets.append(snippet)
        place(data, path, f"@{len(snippets) - 1}@")
        name_objective(rng, data, path)
        changes.append(f"{'.'.join(map(str, path))} given {what} {shown(snippet)}")
    text = json.dumps(data)
    for number, snippet in enumerate(snippets):
        text = text.replace(f'"@{number}@"', f"\n {snippet}\n" if snippet.startswith(("#", "%", "-")) else snippet)
    return "; ".join(changes), text.encode("utf-8", "surrogatepass")


def _reshape(rng: random.Random, data: dict[str, Any], path: Key) -> str:
    """Change the shape of `data` at or above `path`."""
    name = ".".join(map(str, path))
    kind = rng.choice(("missing", "renamed", "listed", "repeated", "flattened", "section"))
    top = str(path[0])
    if kind == "missing":
        data.pop(top, None)
        return f"{top} missing"
    if kind == "renamed":
        data[rng.choice((top.upper(), top + " ", top[:-1], "²", rng.choice(TEXTS)))] = data.pop(top, {})
        return f"{top} renamed"
    if kind == "listed":
        data[top] = [data.get(top)]
        return f"{top} in a list"
    if kind == "repeated":
        data["reward"]["functions"] = data["reward"]["functions"] * rng.choice((2, 100, 5_000))
        return "reward.functions repeated"
    if kind == "flattened":
        data[name] = 1
        return f"{name} as one key"
    data[top] = rng.choice((None, "", 0, [], "text", True))
    return f"{top} becomes {data[top]!r}"


def place(data: dict[str, Any], path: Key, value: Any) -> None:
    """Set a key, making the sections and lists on the way."""
    here: Any = data
    for position, step in enumerate(path[:-1]):
        empty: Any = [{}] if isinstance(path[position + 1], int) else {}
        if isinstance(step, int):
            if not here:
                here.append(empty)
            here = here[0]
            continue
        if not isinstance(here.get(step), type(empty)) or here[step] == []:
            here[step] = empty
        here = here[step]
    if isinstance(path[-1], int):
        here[:1] = [value]
    else:
        here[path[-1]] = value


def name_objective(rng: random.Random, data: dict[str, Any], path: Key) -> None:
    """Where a key of an objective was set, choose one that reads it: a key of another one hides what else is wrong."""
    from qarl.objectives.registry import BY_NAME

    section = data.get("objective")
    if path[0] != "objective" or not isinstance(section, dict) or "name" in section:
        return
    section["name"] = rng.choice(
        [name for name, one in BY_NAME.items() if set(section) <= set(one.model_fields)] or ["sapo"]
    )
    if section["name"] == "custom":
        section.setdefault("path", "objective.py:f")


def mutate_override(rng: random.Random, base: Base, case: Case) -> None:
    """`qarl check` of a good file with hostile `KEY.PATH=VALUE` arguments."""
    make_traps(case.cwd)
    lay_out(base, case, "config")
    overrides = []
    for _ in range(rng.choice((1, 1, 2, 5))):
        path, _ = schema_keys()[int(rng.random() * len(schema_keys()))]
        name = ".".join(map(str, path))
        odd = rng.random()
        if odd < 0.2:
            name = rng.choice(
                (
                    "",
                    ".",
                    "a..b",
                    f"{name}.",
                    f".{name}",
                    f"{name}.x",
                    f"{name}.0",
                    "reward.functions.99999999999999999999.name",
                    "reward.functions.-1.name",
                    "reward.functions.²",
                    "reward.functions.٣.name",
                    "reward.functions." + "9" * 5_000,
                    "k" * 5_000,
                    ".".join("k" * 5_000),
                    rng.choice(TEXTS),
                    "model",
                    "train.steps.0",
                    "0",
                    name.upper(),
                    f" {name} ",
                    f"{name}\n",
                )
            )
        value = yaml_value(rng)[1] if rng.random() < 0.8 else rng.choice((*TEXTS, *PATHS))
        overrides.append(argument(name + ("" if rng.random() < 0.05 else "=") + value))
    case.mutation = "overrides: " + "; ".join(shown(text) for text in overrides)
    case.argv = ["check", "tiny.yaml", *overrides]
