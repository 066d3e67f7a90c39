"""Writes docs/configuration_keys.md, every key of the configuration, from its JSON schema.

python tools/config_reference.py
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration_keys.md"
HEAD = """\
# Configuration keys

All keys, generated from the schema (`qarl schema`) by `python tools/config_reference.py`. Keys are relative to their
section: `path` under [model](#model) is `model.path`. `[]` marks a list of sections. (0, 1] excludes 0 and includes 1;
the schema has further technical limits. A key without a default is null: off, unless the text says otherwise.
`qarl check my.yaml` prints a configuration with all defaults resolved.
"""
NAMES = {"object": "mapping", "string": "text", "integer": "integer", "number": "number", "boolean": "boolean"}
TECHNICAL = 10_000  # bounds from here on only guard against nonsense, and are not shown
Schema = dict[str, Any]


class Row(NamedTuple):
    """A key of a section: its path in the section, its type, its default (as YAML, empty if null), its description."""

    key: str
    kind: str
    default: str
    text: str

    @property
    def meaning(self) -> tuple[str, str, str]:
        """What two kinds of a section have in common if they share the key: all but the default."""
        return self.key, self.kind, self.text


def main() -> None:
    sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "quant_formats")]
    from qarl.config import Config

    PAGE.write_text(page(Config.model_json_schema()))


def page(schema: Schema) -> str:
    """The page as Markdown."""
    definitions, seen = schema["$defs"], {}
    parts = [HEAD]
    for name, entry in schema["properties"].items():
        section = section_of(entry, definitions)
        seen[json.dumps(section)] = name
        parts.append(f"## {name}\n\n{described(section, entry)}\n\n{tables(name, section, definitions, seen)}")
    return "\n".join(parts)


def keys(schema: Schema) -> Iterator[str]:
    """Every key with its section, such as `rollout.vllm.process`; lists of sections without an index."""
    for name, entry in schema["properties"].items():
        section = section_of(entry, schema["$defs"])
        yield name
        for kind in kinds_of(section, schema["$defs"]) or [section]:
            for row in rows("", kind, schema["$defs"], {}, name):
                yield f"{name}.{row.key}".replace("[]", "")


def resolved(entry: Schema, definitions: dict[str, Schema]) -> Schema:
    """The definition that an entry refers to, or the entry itself."""
    while "$ref" in entry:
        entry = definitions[entry["$ref"].removeprefix("#/$defs/")]
    return entry


def section_of(entry: Schema, definitions: dict[str, Schema]) -> Schema:
    """The definition of a section, also if the key may be null or a text instead."""
    section = resolved(entry, definitions)
    inner = [resolved(part, definitions) for part in section.get("anyOf", [])]
    return next((part for part in inner if "oneOf" in part or "properties" in part), section)


def described(section: Schema, entry: Schema) -> str:
    """The first paragraph of a section's description, and the description of a text that is accepted instead."""
    own = str(entry.get("description") or section.get("description", "")).split("\n\n")[0]
    texts = [f"Or a text: {part['description']}" for part in entry.get("anyOf", []) if part.get("type") == "string"]
    return " ".join(" ".join([own, *texts]).split())


def kinds_of(section: Schema, definitions: dict[str, Schema]) -> list[Schema]:
    return [resolved(kind, definitions) for kind in section.get("oneOf", [])]


def tables(section_name: str, section: Schema, definitions: dict[str, Schema], seen: dict[str, str]) -> str:
    """The keys of a section. A section with several kinds has three tables: kinds, shared keys, other keys."""
    kinds = kinds_of(section, definitions)
    if not kinds:
        return table(
            ["key", "type, default", "meaning"],
            [cells(row) for row in rows("", section, definitions, seen, section_name)],
        )
    selector = section.get("discriminator", {}).get("propertyName", "name")
    own, before = {}, dict(seen)
    for kind in kinds:
        name = str(kind["properties"][selector].get("const", kind.get("title")))
        found = dict(before)  # a copy per kind, so that kinds that share a section have equal rows
        own[name] = {row.key: row for row in rows("", kind, definitions, found, section_name)}
        seen.update(found)
    names = [[f"`{name}`", found.pop(selector).text] for name, found in own.items()]
    grouped: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for name, found in own.items():
        for row in found.values():
            grouped.setdefault(row.meaning, {}).setdefault(row.default, []).append(f"`{name}`")
    shared, others = [], []
    for (key, type_, text), by_default in grouped.items():
        common = max(by_default, key=lambda default: len(by_default[default]))
        first, value, meaning = cells(Row(key, type_, common, text))
        for default in (default for default in by_default if default != common):
            value += f"; default for {', '.join(by_default[default])}: {default or 'null'}"
        having = [name for name in names if any(name[0] in some for some in by_default.values())]
        if len(having) == len(own):
            shared.append([first, value, meaning])
        else:
            others.append([first, _listed(names, having), value, meaning])
    return "\n".join(
        [
            table([f"`{selector}`", "meaning"], names),
            table(["key", "type, default", "meaning"], shared),
            table(["key", f"`{selector}`", "type, default", "meaning"], others),
        ]
    )


def _listed(names: list[list[str]], having: list[list[str]]) -> str:
    """The names of `having`, or `all but ...` if that is shorter."""
    rest = [name[0] for name in names if name not in having]
    return ", ".join(name[0] for name in having) if len(rest) >= len(having) else f"all but {', '.join(rest)}"


def rows(
    path: str, section: Schema, definitions: dict[str, Schema], seen: dict[str, str], section_name: str
) -> Iterator[Row]:
    """The keys of a section and of the sections in it.

    Args:
        path: Prefix of the keys, with a trailing dot unless it is empty.
        section: The section's definition.
        definitions: `$defs` of the schema.
        seen: Section names by definition, extended here; a section that the page already has is a link to it.
        section_name: Name of the top-level section.
    """
    required = section.get("required", [])
    for name, entry in section.get("properties", {}).items():
        inner = _section_of(entry, definitions)
        text = " ".join(entry.get("description", described(inner or {}, {})).split())
        default = "required" if name in required else shown(entry.get("default"))
        if default:
            text = re.sub(r" \(default [\d.e-]+\)", "", text)
        known = seen.get(json.dumps(inner)) if inner is not None else None
        if known is not None:
            text += f" The keys of [{known}](#{known.split('.')[0]})."
        yield Row(f"{path}{name}", kind_of(entry, definitions), default, text)
        if inner is not None and known is None:
            below = f"{path}{name}[]" if "array" in _types(entry, definitions) else f"{path}{name}"
            seen.setdefault(json.dumps(inner), f"{section_name}.{below}")
            yield from rows(f"{below}.", inner, definitions, seen, section_name)


def _alternatives(entry: Schema, definitions: dict[str, Schema]) -> list[Schema]:
    entry = resolved(entry, definitions)
    found = [part for key in ("anyOf", "oneOf") for part in entry.get(key, [])]
    return [each for part in found for each in _alternatives(part, definitions)] if found else [entry]


def _types(entry: Schema, definitions: dict[str, Schema]) -> list[str]:
    return [str(part.get("type")) for part in _alternatives(entry, definitions)]


def _section_of(entry: Schema, definitions: dict[str, Schema]) -> Schema | None:
    """The section that a key holds, alone, or in a list."""
    for part in _alternatives(entry, definitions):
        inner = resolved(part.get("items", part) if part.get("type") == "array" else part, definitions)
        if isinstance(inner, dict) and inner.get("properties"):
            return inner
    return None


def kind_of(entry: Schema, definitions: dict[str, Schema]) -> str:
    """The type of a value, with its choices or bounds; null is left out if it is the default."""
    kinds = []
    for part in _alternatives(entry, definitions):
        if "enum" in part or "const" in part:
            choices = part.get("enum", [part.get("const")])
            kinds += [f"`{choice if isinstance(choice, str) else json.dumps(choice)}`" for choice in choices]
        elif part.get("type") == "array":
            items = part.get("items")
            inner = kind_of(items, definitions) if isinstance(items, dict) else "value"
            kinds.append(f"list of {inner}")
        elif part.get("type") == "null":
            kinds += ["null"] if entry.get("default") is not None else []
        elif part.get("properties"):
            kinds.append("section")
        else:
            kinds.append(NAMES.get(str(part.get("type")), "value") + bounds_of(part))
    return ", ".join(dict.fromkeys(kinds))


def bounds_of(part: Schema) -> str:
    """` (0, 1]` or ` >= 1` for a number with bounds; empty if it has none, or only technical limits."""
    low = part["minimum"] if "minimum" in part else part.get("exclusiveMinimum", -math.inf)
    high = part["maximum"] if "maximum" in part else part.get("exclusiveMaximum", math.inf)
    if high >= TECHNICAL:
        return "" if low <= -TECHNICAL else f" {'>=' if 'minimum' in part else '>'} {plain(low)}"
    return f" {'[' if 'minimum' in part else '('}{plain(low)}, {plain(high)}{']' if 'maximum' in part else ')'}"


def plain(number: float) -> str:
    """A number in few characters, exactly: 1e8, 0.0001, 1024, 2^31."""
    if 2**30 <= number < math.inf and math.log2(number).is_integer():
        return f"2^{int(math.log2(number))}"
    short = f"{number:g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    if 10_000 <= abs(number) < math.inf and number % 10_000 == 0:
        digits = str(int(number)).rstrip("0")
        short = f"{digits}e{len(str(int(number))) - len(digits)}"
    return short if float(short) == number else str(number)


def shown(value: Any) -> str:
    """A default, as YAML has it."""
    return "" if value is None else f"`{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}`"


def cells(row: Row) -> list[str]:
    """Key, type with default, and description."""
    choices = row.kind.split(", ")
    if row.default in choices:
        value = ", ".join(f"{choice} (default)" if choice == row.default else choice for choice in choices)
    elif row.default in ("", "required"):
        value = ", ".join(part for part in (row.kind, row.default) if part)
    else:
        value = f"{row.kind}, default {row.default}"
    return [f"`{row.key}`", value, row.text]


def table(heads: list[str], found: list[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    return (
        "\n".join(lines + [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in found])
        + "\n"
    )


if __name__ == "__main__":
    main()
