"""YAML in and out: YAML 1.2 scalars (1e-6 is a number, `no` is a string), and no key twice.

PyYAML reads YAML 1.1, where `lr: 1e-6` is a string, `no` is false and `1:30` is 90. The loader here keeps PyYAML's
safe constructors and replaces the patterns that decide what a plain scalar is by those of YAML 1.2's core schema.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from qarl.errors import UserError

_SCALARS = [
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("tag:yaml.org,2002:merge", r"<<", ["<"]),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes a string when YAML 1.1 *or* 1.2 would read it as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})$"), _first)
    _Dumper.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})$"), _first)


def parse_yaml(text: str, place: str) -> Any:
    """The value of one YAML document.

    place: what the text is (a file name), for messages.
    Raises UserError: not YAML, several documents, an unsafe tag, a key that is no string or stands twice.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        faults = [f"{place}: {fault}" for fault in _key_faults(node, (), set())]
        if faults:
            raise UserError("\n".join(faults))
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise UserError(f"{place}: {_one_line(error)}") from None


def dump_yaml(data: dict[str, Any]) -> str:
    """Block-style YAML, keys in their order, that `parse_yaml` reads back as equal data (tuples as lists)."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _key_faults(node: yaml.Node, path: tuple[str, ...], seen: set[int]) -> list[str]:
    if id(node) in seen:  # an alias of a node that was walked
        return []
    seen.add(id(node))
    faults = []
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            faults += _key_faults(child, (*path, str(index)), seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, child in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                where = ".".join(path) or "top level"
                given = key.value if isinstance(key, yaml.ScalarNode) else f"a {key.id}"
                faults.append(f"{where}: line {line}: key {given} must be a string; put it in quotes")
                continue
            here = (*path, key.value)
            if key.value in lines:
                first = lines[key.value]
                faults.append(
                    f"{'.'.join(here)}: line {line}: the key already stands in line {first}; keep one of them"
                )
            lines.setdefault(key.value, line)
            faults += _key_faults(child, here, seen)
    return faults


def _one_line(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    what = " ".join(part for part in (error.problem, error.context) if part)
    return f"{where}not valid YAML: {' '.join(what.split())}"
