"""Compose YAML nodes within limits, and construct plain values from them.

PyYAML has no limits: an alias may contain itself or expand beyond memory, and brackets nested a thousand deep overflow
its recursion. Its constructors create dates, sets and bytes, and raise ValueError for invalid tagged numbers. This
module counts every node during composition, aliases with their full expansion, and supports the types of JSON only.
Each use of an alias creates separate values, so that an override of one does not change the others.
"""

import math
import re
from typing import Any

import yaml

YAML_BYTES = 256 * 1024  # per document, and characters with all aliases expanded; takes 0.5 seconds to read
NODES = 20_000  # with all aliases expanded
DEPTH = 32
FLOAT_CHARACTERS = 1000

_TAG = "tag:yaml.org,2002:"
# YAML 1.2's core schema: type of a plain scalar -> its pattern and possible first characters.
SCALARS = {
    f"{_TAG}null": (re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    f"{_TAG}bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    f"{_TAG}int": (re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")),
    f"{_TAG}float": (
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+0123456789."),
    ),
    f"{_TAG}merge": (re.compile(r"<<$"), ["<"]),
}
_SURROGATE = re.compile("[\ud800-\udfff]")


class Refused(Exception):
    """A rejected node. mark: Its position, as a PyYAML mark."""

    def __init__(self, mark: Any, text: str) -> None:
        super().__init__(text)
        self.mark, self.text = mark, text


class LimitedComposer(yaml.SafeLoader):
    """Rejects documents beyond the limits, and aliases that contain themselves."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._characters = 0
        self._heights = [0]  # of the nodes that are being composed: levels below each, so far
        self._open: set[str] = set()  # their anchors
        self._measures: dict[int, tuple[int, int, int]] = {}  # node id -> nodes, characters, levels of it

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._open:
                raise Refused(event.start_mark, f"the anchor {event.anchor[:60]!r} contains itself")
            node = super().compose_node(parent, index)
            nodes, characters, levels = self._measures[id(node)]
            self._count(event, nodes, characters, levels)
            return node
        length = len(event.value) if isinstance(event, yaml.ScalarEvent) else 0
        before = self._nodes, self._characters
        self._count(event, 1, length, 1)
        self._heights.append(0)
        self._open.add(event.anchor)
        node = super().compose_node(parent, index)
        self._open.discard(event.anchor)
        levels = self._heights.pop() + 1
        self._measures[id(node)] = self._nodes - before[0], self._characters - before[1], levels
        self._heights[-1] = max(self._heights[-1], levels)
        return node

    def _count(self, event: yaml.Event, nodes: int, characters: int, levels: int) -> None:
        self._nodes += nodes
        self._characters += characters
        if len(self._heights) - 1 + levels > DEPTH:
            raise Refused(event.start_mark, f"nested deeper than {DEPTH} levels")
        if self._nodes > NODES or self._characters > YAML_BYTES:
            most = f"{NODES:,} values or {YAML_BYTES:,} characters"
            raise Refused(event.start_mark, f"holds more than {most} up to here, each alias written out; shorten it")
        self._heights[-1] = max(self._heights[-1], levels)


class Values:
    """Constructs plain values from nodes. faults: (key path, message) of non-string and duplicate keys."""

    def __init__(self) -> None:
        self.faults: dict[int, tuple[tuple[str, ...], str]] = {}

    def of(self, node: yaml.Node, path: tuple[str, ...] = ()) -> Any:
        """Convert a node. Raises Refused if a scalar does not match its tag, or the tag is not one of JSON's types."""
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        _require_tag(node, "seq" if isinstance(node, yaml.SequenceNode) else "map")
        if isinstance(node, yaml.SequenceNode):
            return [self.of(child, (*path, str(index))) for index, child in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        return self._mapping(node, path)

    def _mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, child in node.value:
            if key.tag == f"{_TAG}merge":
                merged.update(self._merged(child, path))
                continue
            line = key.start_mark.line + 1
            if key.tag != f"{_TAG}str" or not isinstance(key, yaml.ScalarNode):
                given = key.value[:60] if isinstance(key, yaml.ScalarNode) else f"a {key.id}"
                self.faults[id(key)] = path, f"line {line}: key {given} must be a string; put it in quotes"
                continue
            name = _scalar(key)
            if name in lines:
                text = f"line {line}: the key is already in line {lines[name]}; keep one of them"
                self.faults[id(key)] = (*path, name), text
            lines.setdefault(name, line)
            own[name] = self.of(child, (*path, name))
        return {**merged, **own}

    def _merged(self, node: yaml.Node, path: tuple[str, ...]) -> dict[str, Any]:
        """Values merged by `<<`. In a list of mappings, earlier ones take precedence."""
        parts = list(reversed(node.value)) if isinstance(node, yaml.SequenceNode) else [node]
        found: dict[str, Any] = {}
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                raise Refused(part.start_mark, "`<<` takes a mapping, or a list of mappings")
            found.update(self.of(part, path))
        return found


def _scalar(node: yaml.ScalarNode) -> Any:
    kind, text = node.tag.removeprefix(_TAG), node.value
    if kind in ("str", "merge"):  # `<<` as a value
        if _SURROGATE.search(text):
            raise Refused(node.start_mark, "contains a lone surrogate (\\ud800 to \\udfff), which is not a character")
        return text
    if kind not in ("null", "bool", "int", "float"):
        _require_tag(node, "str")
    if kind == "float" and SCALARS[f"{_TAG}int"][0].match(text):
        return _float(node, text)
    if not SCALARS[node.tag][0].match(text):
        raise Refused(node.start_mark, f"{text[:60]!r} does not match its tag !!{kind}")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    return _int(node, text) if kind == "int" else _float(node, text)


def _int(node: yaml.ScalarNode, text: str) -> int:
    digits = text.replace("_", "")
    value = int(digits) if len(digits) <= 20 else None
    if value is None or not -(2**63) <= value < 2**63:
        shown = digits if len(digits) <= 40 else f"{digits[:20]}... of {len(digits):,} characters"
        raise Refused(node.start_mark, f"the integer {shown} does not fit 64 bits")
    return value


def _float(node: yaml.ScalarNode, text: str) -> float:
    digits = text.replace("_", "").lower()
    if digits.endswith((".inf", ".nan")):
        return float(digits.replace(".", ""))
    value = float(digits) if len(digits) <= FLOAT_CHARACTERS else math.inf
    if math.isinf(value):
        raise Refused(node.start_mark, f"the number {digits[:40]} is too large for a float")
    return value


def _require_tag(node: yaml.Node, kind: str) -> None:
    if node.tag != f"{_TAG}{kind}":
        tag = node.tag if len(node.tag) <= 80 else node.tag[:77] + "..."
        raise Refused(node.start_mark, f"could not determine a constructor for the tag {tag!r}; leave the tag out")
