"""Read and write YAML with YAML 1.2 scalars (1e-6 is a number, `no` is a string) and without duplicate keys.

PyYAML reads YAML 1.1, where `lr: 1e-6` is a string, `no` is false and `1:30` is 90, and it has no limits: an alias may
contain itself or expand beyond memory. This module uses its scanner, parser and composer, with the patterns of YAML
1.2's core schema for plain scalars. It constructs values of JSON's types only, within limits. Each use of an alias
creates separate values, so that an override of one does not change the others.
"""

import math
import re
from typing import Any

import yaml

from qarl.config.messages import capped, shown
from qarl.errors import UserError
from qarl.utils.text import visible

YAML_BYTES = 256 * 1024  # per document, and characters with all aliases expanded
NODES = 20_000  # with all aliases expanded
DEPTH = 32
FLOAT_CHARACTERS = 1000

_TAG = "tag:yaml.org,2002:"
# YAML 1.2's core schema: type of a plain scalar -> its pattern and possible first characters.
_SCALARS = {
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
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - as PyYAML has it


class _Dumper(yaml.SafeDumper):
    """Quotes a string if YAML 1.1 *or* 1.2 would parse it as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # Single quotes turn these line ends of Unicode into spaces or line feeds; double quotes have escapes for them.
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _LINE_ENDS.search(text) else None)


_Dumper.add_representer(str, _Dumper.represent_text)
for _tag, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


class _Refused(Exception):
    """A rejected node. mark: Its position, as a PyYAML mark."""

    def __init__(self, mark: Any, text: str) -> None:
        super().__init__(text)
        self.mark = mark


def parse_yaml(text: str, place: str) -> Any:
    """Parse one YAML document into None, bool, 64-bit int, float, str, and lists and dicts of them.

    Args:
        text: The document.
        place: Name of the source (a file name), for messages.

    Raises:
        UserError: Not YAML, several documents, beyond the limits of this module, an unsupported tag, or a key that is
            not a string or occurs twice.
    """
    if len(text) > YAML_BYTES:
        raise UserError(f"{place}: has {len(text):,} characters; YAML may have at most {YAML_BYTES:,}")
    values = _Values()
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        except (ValueError, OverflowError):  # of PyYAML's scanner: chr() of an escape, int() of a directive
            raise _Refused(loader.get_mark(), "not valid YAML: no such character or version") from None
        except RecursionError:
            raise _Refused(loader.get_mark(), f"nested deeper than {DEPTH} levels") from None
        value = None if node is None else values.of(node)
    except _Refused as error:
        raise UserError(f"{place}: {_where(error.mark)}{error}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"line {before.count(chr(10)) + 1}, column {error.position - before.rfind(chr(10))}"
        what = f"the character U+{ord(text[error.position]):04X}"
        raise UserError(f"{place}: {where}: not valid YAML: {what}: {error.reason}; write it as an escape") from None
    except yaml.MarkedYAMLError as error:
        what = " ".join(part for part in (error.problem, error.context) if part)
        where = _where(error.problem_mark or error.context_mark)
        raise UserError(f"{place}: {where}not valid YAML: {shown(what, 200)}") from None
    if values.faults:
        keys = [(shown(".".join(path), 120) or "top level", text) for path, text in values.faults.values()]
        raise UserError("\n".join(capped([f"{place}: {key}: {text}" for key, text in keys], place)))
    return value


def dump_yaml(data: dict[str, Any]) -> str:
    """Write block-style YAML, in key order, that `parse_yaml` reads back as equal data (tuples as lists).

    If the data contains control or bidirectional characters, the output is ASCII with YAML escapes.
    """
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    if visible(text, keep_newlines=True) != text:
        text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)
    return text


class _Values:
    """Constructs plain values from nodes. faults: (key path, message) of non-string and duplicate keys."""

    def __init__(self) -> None:
        self.faults: dict[int, tuple[tuple[str, ...], str]] = {}
        self._nodes = self._characters = 0

    def of(self, node: yaml.Node, path: tuple[str, ...] = (), depth: int = 1) -> Any:
        """Convert a node. Raises _Refused beyond the limits, for a scalar that does not match its tag, and for a tag
        that is not one of JSON's types.
        """
        self._nodes += 1
        self._characters += len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        if depth > DEPTH:
            raise _Refused(node.start_mark, f"nested deeper than {DEPTH} levels")
        if self._nodes > NODES or self._characters > YAML_BYTES:
            most = f"{NODES:,} values or {YAML_BYTES:,} characters"
            raise _Refused(node.start_mark, f"holds more than {most} up to here, each alias written out; shorten it")
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        _require_tag(node, "seq" if isinstance(node, yaml.SequenceNode) else "map")
        if isinstance(node, yaml.SequenceNode):
            return [self.of(child, (*path, str(index)), depth + 1) for index, child in enumerate(node.value)]
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, child in node.value:
            if key.tag == f"{_TAG}merge":
                merged.update(self._merged(child, path, depth))
                continue
            line = key.start_mark.line + 1
            if key.tag != f"{_TAG}str" or not isinstance(key, yaml.ScalarNode):
                given = key.value[:60] if isinstance(key, yaml.ScalarNode) else f"a {key.id}"
                self.faults[id(key)] = path, f"line {line}: key {given} must be a string; put it in quotes"
                continue
            name = self.of(key, path, depth)
            if name in lines:
                text = f"line {line}: the key is already in line {lines[name]}; keep one of them"
                self.faults[id(key)] = (*path, name), text
            lines.setdefault(name, line)
            own[name] = self.of(child, (*path, name), depth + 1)
        return {**merged, **own}

    def _merged(self, node: yaml.Node, path: tuple[str, ...], depth: int) -> dict[str, Any]:
        """Values merged by `<<`. In a list of mappings, earlier ones take precedence."""
        found: dict[str, Any] = {}
        for part in reversed(node.value) if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(part, yaml.MappingNode):
                raise _Refused(part.start_mark, "`<<` takes a mapping, or a list of mappings")
            found.update(self.of(part, path, depth + 1))
        return found


def _scalar(node: yaml.ScalarNode) -> Any:
    kind, text = node.tag.removeprefix(_TAG), node.value
    if kind in ("str", "merge"):  # `<<` as a value
        if _SURROGATE.search(text):
            raise _Refused(node.start_mark, "contains a lone surrogate (\\ud800 to \\udfff), which is not a character")
        return text
    if node.tag not in _SCALARS:
        _require_tag(node, "str")
    whole = _SCALARS[f"{_TAG}int"][0].match(text)
    if not _SCALARS[node.tag][0].match(text) and not (kind == "float" and whole):
        raise _Refused(node.start_mark, f"{text[:60]!r} does not match its tag !!{kind}")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    digits = text.replace("_", "").lower()
    if kind == "int":
        if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
            given = digits if len(digits) <= 40 else f"{digits[:20]}... of {len(digits):,} characters"
            raise _Refused(node.start_mark, f"the integer {given} does not fit 64 bits")
        return int(digits)
    if digits.endswith((".inf", ".nan")):
        return float(digits.replace(".", ""))
    value = float(digits) if len(digits) <= FLOAT_CHARACTERS else math.inf
    if math.isinf(value):
        raise _Refused(node.start_mark, f"the number {digits[:40]} is too large for a float")
    return value


def _require_tag(node: yaml.Node, kind: str) -> None:
    if node.tag != f"{_TAG}{kind}":
        text = f"could not determine a constructor for the tag {shown(node.tag, 80)!r}; leave the tag out"
        raise _Refused(node.start_mark, text)


def _where(mark: yaml.Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
