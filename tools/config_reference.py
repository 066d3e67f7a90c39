"""Write docs/configuration_keys.md, which lists every configuration key, from the JSON schema.

python tools/config_reference.py
"""

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
TECHNICAL = 10_000  # bounds of this size or more only guard against nonsense, and are not shown
Schema = dict[str, Any]


class Row(NamedTuple):
    """A key: its path in its section, its type, its default (as YAML; empty if null) and its description."""

    key: str
    kind: str
    default: str
    text: str


def main() -> None:
    sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "quant_formats")]
    from qarl.config import Config

    PAGE.write_text(page(Config.model_json_schema()))


def page(schema: Schema) -> str:
    """Return the page as Markdown."""
    parts, seen = [HEAD], dict[str, str]()
    for name, entry in inlined(schema)["properties"].items():
        section = section_of(entry)
        seen[json.dumps(section)] = name
        parts.append(f"## {name}\n\n{described(section, entry)}\n\n{tables(name, section, seen)}")
    return "\n".join(parts)


def keys(schema: Schema) -> Iterator[str]:
    """Yield every key with its section, such as `rollout.vllm.process`; lists of sections without an index."""
    for name, entry in inlined(schema)["properties"].items():
        yield name
        section = section_of(entry)
        for kind in section.get("oneOf", [section]):
            for row in rows("", kind, name, {}):
                yield f"{name}.{row.key}".replace("[]", "")


def inlined(node: Any, definitions: dict[str, Schema] | None = None) -> Any:
    """Replace references in a schema by definitions. With a description or default, the definition is in `anyOf`."""
    if isinstance(node, list):
        return [inlined(part, definitions) for part in node]
    if not isinstance(node, dict):
        return node
    definitions = node.get("$defs", definitions or {})
    rest = {key: inlined(value, definitions) for key, value in node.items() if key not in ("$ref", "$defs")}
    if "$ref" not in node:
        return rest
    definition = inlined(definitions[node["$ref"].removeprefix("#/$defs/")], definitions)
    return {"anyOf": [definition], **rest} if rest else definition


def described(section: Schema, entry: Schema) -> str:
    """Return the first paragraph of a section's description, and the description of a text that may replace it."""
    own = str(entry.get("description") or section.get("description", "")).split("\n\n")[0]
    texts = [f"Or a text: {part['description']}" for part in entry.get("anyOf", []) if part.get("type") == "string"]
    return " ".join(" ".join([own, *texts]).split())


def alternatives(entry: Schema) -> list[Schema]:
    """Return the definitions that a value may have: those in `anyOf` and `oneOf`, at any depth."""
    found = [part for key in ("anyOf", "oneOf") for part in entry.get(key, [])]
    return [each for part in found for each in alternatives(part)] if found else [entry]


def section_of(entry: Schema) -> Schema:
    """Return the definition of a section, also if the key may be null or text instead."""
    return next((part for part in entry.get("anyOf", []) if "oneOf" in part or "properties" in part), entry)


def tables(name: str, section: Schema, seen: dict[str, str]) -> str:
    """Return the tables of a section: one, or for a section with several kinds three (kinds, shared keys, other keys).

    Args:
        name: Name of the section.
        section: Its definition.
        seen: Definition -> name of the sections that the page already has, to which later occurrences link.
    """
    head, kinds = ["key", "type, default", "meaning"], section.get("oneOf", [])
    if not kinds:
        return table(head, [cells(row) for row in rows("", section, name, seen)])
    selector = section.get("discriminator", {}).get("propertyName", "name")
    before = dict(seen)
    names: dict[str, str] = {}
    found: dict[Row, dict[str, list[str]]] = {}  # rows without their default -> default -> kinds
    for kind in kinds:
        label = f"`{kind['properties'][selector].get('const', kind.get('title'))}`"
        own = dict(before)  # a copy per kind, so that kinds that share a section have equal rows
        for row in rows("", kind, name, own):
            if row.key == selector:
                names[label] = row.text
            else:
                found.setdefault(row._replace(default=""), {}).setdefault(row.default, []).append(label)
        seen |= own
    shared, others = [], []
    for row, by_default in found.items():
        common = max(by_default, key=lambda default: len(by_default[default]))
        key, value, text = cells(row._replace(default=common))
        for default, labels in by_default.items():
            value += f"; default for {', '.join(labels)}: {default or 'null'}" if default != common else ""
        having = [label for label in names if any(label in some for some in by_default.values())]
        if rest := [label for label in names if label not in having]:
            which = ", ".join(having) if len(rest) >= len(having) else f"all but {', '.join(rest)}"
            others.append([key, which, value, text])
        else:
            shared.append([key, value, text])
    listed = [table([f"`{selector}`", "meaning"], [list(item) for item in names.items()]), table(head, shared)]
    return "\n".join([*listed, table(["key", f"`{selector}`", *head[1:]], others)])


def rows(path: str, section: Schema, name: str, seen: dict[str, str]) -> Iterator[Row]:
    """Yield the keys of a section and of the sections in it. path: Prefix of the keys, empty or with a trailing dot.
    name: Name of the top-level section."""
    required = section.get("required", [])
    for key, entry in section.get("properties", {}).items():
        inner = inner_section(entry)
        text = " ".join(entry.get("description", described(inner or {}, {})).split())
        default = "required" if key in required else shown(entry.get("default"))
        if default:
            text = re.sub(r" \(default [\d.e-]+\)", "", text)
        known = seen.get(json.dumps(inner)) if inner is not None else None
        if known is not None:
            text += f" The keys of [{known}](#{known.split('.')[0]})."
        yield Row(f"{path}{key}", kind_of(entry), default, text)
        if inner is not None and known is None:
            several = any(part.get("type") == "array" for part in alternatives(entry))
            below = f"{path}{key}{'[]' if several else ''}"
            seen.setdefault(json.dumps(inner), f"{name}.{below}")
            yield from rows(f"{below}.", inner, name, seen)


def inner_section(entry: Schema) -> Schema | None:
    """Return the section that a key contains, directly or in a list; None if there is none."""
    parts = [part.get("items", part) if part.get("type") == "array" else part for part in alternatives(entry)]
    return next((part for part in parts if isinstance(part, dict) and part.get("properties")), None)


def kind_of(entry: Schema) -> str:
    """Return the type of a value, with its choices or bounds; null is left out if it is the default."""
    kinds = []
    for part in alternatives(entry):
        if "enum" in part or "const" in part:
            choices = part.get("enum", [part.get("const")])
            kinds += [f"`{choice if isinstance(choice, str) else json.dumps(choice)}`" for choice in choices]
        elif part.get("type") == "array":
            items = part.get("items", part.get("prefixItems", [None])[0])
            kinds.append(f"list of {kind_of(items) if isinstance(items, dict) else 'value'}")
        elif part.get("type") == "null":
            kinds += ["null"] if entry.get("default") is not None else []
        elif part.get("properties"):
            kinds.append("section")
        else:
            kinds.append(NAMES.get(str(part.get("type")), "value") + bounds_of(part))
    return ", ".join(dict.fromkeys(kinds))


def bounds_of(part: Schema) -> str:
    """Return ` (0, 1]` or ` >= 1` for a number with bounds; empty if it has none, or only technical limits."""
    low = part["minimum"] if "minimum" in part else part.get("exclusiveMinimum", -math.inf)
    high = part["maximum"] if "maximum" in part else part.get("exclusiveMaximum", math.inf)
    if high >= TECHNICAL:
        return "" if low <= -TECHNICAL else f" {'>=' if 'minimum' in part else '>'} {low:g}"
    return f" {'[' if 'minimum' in part else '('}{low:g}, {high:g}{']' if 'maximum' in part else ')'}"


def shown(value: Any) -> str:
    """Format a default as YAML."""
    return "" if value is None else f"`{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}`"


def cells(row: Row) -> list[str]:
    """Return key, type with default, and description."""
    choices = row.kind.split(", ")
    if row.default in choices:
        value = ", ".join(f"{choice} (default)" if choice == row.default else choice for choice in choices)
    elif row.default in ("", "required"):
        value = ", ".join(part for part in (row.kind, row.default) if part)
    else:
        value = f"{row.kind}, default {row.default}"
    return [f"`{row.key}`", value, row.text]


def table(heads: list[str], found: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in line] for line in found)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
