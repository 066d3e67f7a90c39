"""Writes docs/configuration_keys.md, every key of the configuration, from its JSON schema.

    python tools/config_reference.py

With --check nothing is written, and the exit code is 1 where the page is not what the schema says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration_keys.md"
HEAD = """\
# Configuration keys

Every key, its type with bounds, its default and what it means; written by `python tools/config_reference.py` from what
`qarl schema` prints. A list of sections has `[]` in its keys. A default of null stands for what the text says, or for
off. `qarl check my.yaml` prints a configuration with all of them, after what depends on other keys is decided.
"""
NAMES = {"object": "mapping", "string": "text", "integer": "integer", "number": "number", "boolean": "boolean"}
SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
Schema = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is another")
    check = parser.parse_args().check
    sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "quant_formats")]
    from qarl.config import Config

    text = page(Config.model_json_schema())
    if check:
        if PAGE.read_text() != text:
            print(f"{PAGE.relative_to(ROOT)} is not what the schema says; run python tools/config_reference.py")
            return 1
        return 0
    PAGE.write_text(text)
    return 0


def page(schema: Schema) -> str:
    """The page as Markdown."""
    definitions = schema["$defs"]
    parts = [HEAD]
    for name, entry in schema["properties"].items():
        section = section_of(entry, definitions)
        parts.append(f"## {name}\n\n{described(section, entry)}\n\n{tables(name, section, definitions)}")
    return "\n".join(parts)


def resolved(entry: Schema, definitions: dict[str, Schema]) -> Schema:
    """The definition that an entry refers to; the entry itself where it refers to none."""
    while "$ref" in entry:
        entry = definitions[entry["$ref"].removeprefix("#/$defs/")]
    return entry


def section_of(entry: Schema, definitions: dict[str, Schema]) -> Schema:
    """The definition of a section, also of one that may be null or a text instead."""
    section = resolved(entry, definitions)
    inner = [resolved(part, definitions) for part in section.get("anyOf", [])]
    return next((part for part in inner if "oneOf" in part or "properties" in part), section)


def described(section: Schema, entry: Schema) -> str:
    """The first paragraph of what a section says of itself, and of a text that may stand in its place."""
    own = str(entry.get("description") or section.get("description", "")).split("\n\n")[0]
    texts = [f"Or a text: {part['description']}" for part in entry.get("anyOf", []) if part.get("type") == "string"]
    return " ".join(" ".join([own, *texts]).split())


def tables(path: str, section: Schema, definitions: dict[str, Schema]) -> str:
    """The keys of a section; of one that comes in several kinds, first those that all have, then those of each."""
    kinds = [resolved(kind, definitions) for kind in section.get("oneOf", [])]
    if not kinds:
        return table(list(rows(path, section, definitions)))
    each = [list(rows(path, kind, definitions)) for kind in kinds]
    common = [row for row in each[0] if all(row in own for own in each)]
    parts = [table(common)]
    for kind, own in zip(kinds, each, strict=True):
        name, found = kind_name(section, kind), table([row for row in own if row not in common])
        parts.append(f"### {path} of {name}\n\n{described(kind, {})}\n\n{found}")
    return "\n".join(parts)


def kind_name(section: Schema, kind: Schema) -> str:
    """`name: tbpo`, by the key that tells the kinds apart."""
    key = section.get("discriminator", {}).get("propertyName", "name")
    return f"`{key}: {kind['properties'][key].get('const', kind.get('title'))}`"


def rows(path: str, section: Schema, definitions: dict[str, Schema]) -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, description) of each key of a section and of the sections in it."""
    required = section.get("required", [])
    for name, entry in section.get("properties", {}).items():
        key, inner = f"{path}.{name}", _section_of(entry, definitions)
        text = " ".join(entry.get("description", described(inner or {}, {})).split())
        default = "required" if name in required else shown(entry.get("default"))
        yield key, kind_of(entry, definitions), default, text
        if inner is not None:
            suffix = "[]" if "array" in _types(entry, definitions) else ""
            yield from rows(f"{key}{suffix}", inner, definitions)


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
    """The type of a value, with its choices or bounds."""
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
            kinds.append("null")
        elif part.get("properties"):
            kinds.append("section")
        else:
            names = {
                "object": "mapping",
                "string": "text",
                "integer": "integer",
                "number": "number",
                "boolean": "boolean",
            }
            kinds.append(names.get(str(part.get("type")), "value") + bounds_of(part))
    return ", ".join(dict.fromkeys(kinds))


def bounds_of(part: Schema) -> str:
    """` > 0, <= 1`, of a number; nothing where it has none."""
    numbers = [(sign, part[key]) for key, sign in SIGNS.items() if key in part]
    return "".join(f" {sign} {number:,}" if number >= 1 else f" {sign} {number:g}" for sign, number in numbers)


def shown(value: Any) -> str:
    """A default, as YAML has it."""
    return "" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`"


def table(found: list[tuple[str, str, str, str]]) -> str:
    if not found:
        return "No keys of its own.\n"
    lines = ["| key | type | default | |", "| --- | --- | --- | --- |"]
    for key, kind, default, text in found:
        cells = (f"`{key}`", kind, default or "null", text)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
