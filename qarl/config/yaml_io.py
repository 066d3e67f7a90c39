"""Read and write YAML with YAML 1.2 scalars (1e-6 is a number, `no` is a string) and without duplicate keys.

PyYAML reads YAML 1.1, where `lr: 1e-6` is a string, `no` is false and `1:30` is 90. The loader here keeps PyYAML's
scanner and parser, and replaces the patterns that give plain scalars their types by those of YAML 1.2's core schema.
"""

import re
from typing import Any

import yaml

from qarl.config.messages import capped, shown
from qarl.config.yaml_nodes import SCALARS, YAML_BYTES, LimitedComposer, Refused, Values
from qarl.errors import UserError
from qarl.utils.text import visible

_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


class _Loader(LimitedComposer):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - as PyYAML has it


class _Dumper(yaml.SafeDumper):
    """Quotes a string if YAML 1.1 *or* 1.2 would parse it as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # Single quotes turn these line ends of Unicode into spaces or line feeds; double quotes have escapes for them.
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _LINE_ENDS.search(text) else None)


_Dumper.add_representer(str, _Dumper.represent_text)
for _tag, (_pattern, _first) in SCALARS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def parse_yaml(text: str, place: str) -> Any:
    """Parse one YAML document into None, bool, 64-bit int, float, str, and lists and dicts of them.

    Args:
        text: The document.
        place: Name of the source (a file name), for messages.

    Raises:
        UserError: Not YAML, several documents, beyond the limits of `qarl.config.yaml_nodes`, an unsupported tag, or a
            key that is not a string or occurs twice.
    """
    if len(text) > YAML_BYTES:
        raise UserError(f"{place}: has {len(text):,} characters, more than the {YAML_BYTES:,} that are read of YAML")
    values = Values()
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        except (ValueError, OverflowError):  # of PyYAML's scanner: chr() of an escape, int() of a directive
            raise Refused(loader.get_mark(), "not valid YAML: no such character or version") from None
        value = None if node is None else values.of(node)
    except Refused as error:
        raise UserError(f"{place}: {_where(error.mark)}{error.text}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"line {before.count(chr(10)) + 1}, column {error.position - before.rfind(chr(10))}"
        what = f"the character U+{ord(text[error.position]):04X}"
        raise UserError(f"{place}: {where}: not valid YAML: {what}: {error.reason}; write it as an escape") from None
    except yaml.YAMLError as error:
        raise UserError(f"{place}: {_one_line(error)}") from None
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


def _where(mark: yaml.Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""


def _one_line(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"not valid YAML: {shown(str(error), 200)}"
    what = " ".join(part for part in (error.problem, error.context) if part)
    return f"{_where(error.problem_mark or error.context_mark)}not valid YAML: {shown(what, 200)}"
