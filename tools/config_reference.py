"""Writes docs/configuration_keys.md, every key of the configuration, from its JSON schema.

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
TECHNICAL = 10_000  # bounds from here on only guard against nonsense, and are not shown
Schema = dict[str, Any]


class Row(NamedTuple):
    """A key of a section: its path in the section, its type, its default (as YAML, empty if null), its description."""

    key: str
    kind: str
    default: str
    text: str


def main() -> None:
    sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "quant_formats")]
    from qarl.config import Config

    PAGE.write_text(page(Config.model_json_schema()))


def page(schema: Schema) -> str:
    """The page as Markdown."""
    reference, parts = Reference(schema), [HEAD]
    for name, entry in schema["properties"].items():
        section = reference.section(entry)
        reference.seen[json.dumps(section)] = name
        parts.append(f"## {name}\n\n{described(section, entry)}\n\n{reference.tables(name, section)}")
    return "\n".join(parts)


def keys(schema: Schema) -> Iterator[str]:
    """Every key with its section, such as `rollout.vllm.process`; lists of sections without an index."""
    for name, entry in schema["properties"].items():
        yield name
        section = Reference(schema).section(entry)
        for kind in Reference(schema).kinds(section) or [section]:
            for row in Reference(schema).rows("", kind, name):
                yield f"{name}.{row.key}".replace("[]", "")


def described(section: Schema, entry: Schema) -> str:
    """The first paragraph of a section's description, and the description of a text that is accepted instead."""
    own = str(entry.get("description") or section.get("description", "")).split("\n\n")[0]
    texts = [f"Or a text: {part['description']}" for part in entry.get("anyOf", []) if part.get("type") == "string"]
    return " ".join(" ".join([own, *texts]).split())


class Reference:
    """The sections of a schema.

    Attributes:
        seen: Names of sections that the page already has, by definition; they are links where they occur again.
    """

    def __init__(self, schema: Schema) -> None:
        self._definitions: dict[str, Schema] = schema["$defs"]
        self.seen: dict[str, str] = {}

    def resolved(self, entry: Schema) -> Schema:
        """The definition that an entry refers to, or the entry itself."""
        while "$ref" in entry:
            entry = self._definitions[entry["$ref"].removeprefix("#/$defs/")]
        return entry

    def alternatives(self, entry: Schema) -> list[Schema]:
        """The definitions that a value may have, of `anyOf` and `oneOf` at any depth."""
        entry = self.resolved(entry)
        found = [part for key in ("anyOf", "oneOf") for part in entry.get(key, [])]
        return [each for part in found for each in self.alternatives(part)] if found else [entry]

    def section(self, entry: Schema) -> Schema:
        """The definition of a section, also if the key may be null or a text instead."""
        section = self.resolved(entry)
        inner = [self.resolved(part) for part in section.get("anyOf", [])]
        return next((part for part in inner if "oneOf" in part or "properties" in part), section)

    def kinds(self, section: Schema) -> list[Schema]:
        """The definitions of a section that has several."""
        return [self.resolved(kind) for kind in section.get("oneOf", [])]

    def tables(self, name: str, section: Schema) -> str:
        """The keys of a section. A section with several kinds has three tables: kinds, shared keys, other keys."""
        head, kinds = ["key", "type, default", "meaning"], self.kinds(section)
        if not kinds:
            return table(head, [cells(row) for row in self.rows("", section, name)])
        selector = section.get("discriminator", {}).get("propertyName", "name")
        before, seen = dict(self.seen), dict(self.seen)
        names: dict[str, str] = {}
        found: dict[Row, dict[str, list[str]]] = {}  # rows without their default -> default -> kinds
        for kind in kinds:
            label = f"`{kind['properties'][selector].get('const', kind.get('title'))}`"
            self.seen = dict(before)  # a copy per kind, so that kinds that share a section have equal rows
            for row in self.rows("", kind, name):
                if row.key == selector:
                    names[label] = row.text
                else:
                    found.setdefault(row._replace(default=""), {}).setdefault(row.default, []).append(label)
            seen |= self.seen
        self.seen = seen
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
        tables = [table([f"`{selector}`", "meaning"], [list(item) for item in names.items()]), table(head, shared)]
        return "\n".join([*tables, table(["key", f"`{selector}`", *head[1:]], others)])

    def rows(self, path: str, section: Schema, name: str) -> Iterator[Row]:
        """The keys of a section and of the sections in it.

        Args:
            path: Prefix of the keys, with a trailing dot unless it is empty.
            section: The section's definition.
            name: Name of the top-level section.
        """
        required = section.get("required", [])
        for key, entry in section.get("properties", {}).items():
            inner = self._inner_section(entry)
            text = " ".join(entry.get("description", described(inner or {}, {})).split())
            default = "required" if key in required else shown(entry.get("default"))
            if default:
                text = re.sub(r" \(default [\d.e-]+\)", "", text)
            known = self.seen.get(json.dumps(inner)) if inner is not None else None
            if known is not None:
                text += f" The keys of [{known}](#{known.split('.')[0]})."
            yield Row(f"{path}{key}", self._kind(entry), default, text)
            if inner is not None and known is None:
                several = any(part.get("type") == "array" for part in self.alternatives(entry))
                below = f"{path}{key}{'[]' if several else ''}"
                self.seen.setdefault(json.dumps(inner), f"{name}.{below}")
                yield from self.rows(f"{below}.", inner, name)

    def _inner_section(self, entry: Schema) -> Schema | None:
        """The section that a key holds, alone, or in a list."""
        for part in self.alternatives(entry):
            inner = self.resolved(part.get("items", part) if part.get("type") == "array" else part)
            if isinstance(inner, dict) and inner.get("properties"):
                return inner
        return None

    def _kind(self, entry: Schema) -> str:
        """The type of a value, with its choices or bounds; null is left out if it is the default."""
        kinds = []
        for part in self.alternatives(entry):
            if "enum" in part or "const" in part:
                choices = part.get("enum", [part.get("const")])
                kinds += [f"`{choice if isinstance(choice, str) else json.dumps(choice)}`" for choice in choices]
            elif part.get("type") == "array":
                items = part.get("items", part.get("prefixItems", [None])[0])
                kinds.append(f"list of {self._kind(items) if isinstance(items, dict) else 'value'}")
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
        return "" if low <= -TECHNICAL else f" {'>=' if 'minimum' in part else '>'} {low:g}"
    return f" {'[' if 'minimum' in part else '('}{low:g}, {high:g}{']' if 'maximum' in part else ')'}"


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
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in line] for line in found)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
