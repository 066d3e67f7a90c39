"""Strategies for hostile values: texts, paths, numbers, YAML and JSON; and helpers for drawing."""

import json
import re
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, sampled_from

T = TypeVar("T")
ESCAPE, OVERRIDE = "\x1b[31mred", "abc\u202edef"  # a terminal would act on these


def pick(draw: DrawFn, options: Sequence[T]) -> T:
    """Draw one of `options`."""
    return draw(sampled_from(options))


def chance(draw: DrawFn, percent: int) -> bool:
    """Draw True with a probability of `percent` percent."""
    return draw(st.integers(0, 99)) < percent


def position(draw: DrawFn, length: int) -> int:
    """Draw an index below `length`, from a fixed range, because lengths of records differ between bases."""
    return draw(st.integers(0, 2**20 - 1)) * length >> 20


def shown(text: str, limit: int = 60) -> str:
    """Format `text` as one line of printable ASCII, shortened."""
    plain = ascii(text)[1:-1]
    return plain if len(plain) <= limit else f"{plain[:limit]}... ({len(text)} characters)"


def listed(text: str) -> list[str]:
    """Split a text at line breaks and at two or more spaces."""
    return re.split(r"\s*\n\s*|  +", text.strip())


characters = st.characters(exclude_categories=())  # surrogates and control characters included
# Texts with a meaning to qarl, Python's format(), an importer, a regular expression, rich or a shell.
MEANINGFUL = listed(r"""
    [bold red]markup[/]  [/]  [link=http://x]y  {prompt:>99999999999}  {0}  {  }  {prompt.__class__}
    {prompt!r:{prompt}}  %s%n%d  $HOME  `id`  null  true  1e6  ²²²  ٣  NaN  -1  re:(  re:(a+)+$  re:.*  task:nothing
    reasoning-gym:../x  package:  package:os  package:..  package:nosuch  a:b:c  x.py:f  os:system  no.module:f
    builtins:eval  math,exact  ,  0,  ../../../etc/passwd  https://example.com/x  org/name/extra  -  --  a=b  x
""")
UNPRINTABLE = ("\0", "a\0b", ESCAPE, OVERRIDE, "\x1b]0;title\x07", "\u2028line", "\ufeff", "\ud800", "a\r\n\tb")
LONG = ("x" * 5_000, "e\u0301" * 100, "日本" * 5_000)
texts = sampled_from(["", " ", *MEANINGFUL]) | sampled_from((*UNPRINTABLE, *LONG)) | st.text(characters, max_size=20)

# Paths that lead out of a case's directory, to a missing entry, to a device, or to something that is not a file.
ODD_PATHS = listed("""
    ~nosuchuser/x  ~  model  model/below  rows.jsonl/below  .  ..  ../../x  model//x  /dev/full  /proc/self/mem
    /proc/nonexistent/x  /proc/self/fd/1
""")
paths = sampled_from([*ODD_PATHS, *ODD_PATHS, " ", "new\nline", "n" * 300, "p/" * 2_500, *UNPRINTABLE])
# Names of files, steps and tensors, for keys that expect a plain name.
names = listed(
    "../x  ../../model/config.json  /etc/passwd  a/b  ²²²  -00001  000000  999999999  state.json  con.safetensors"
)
file_names = sampled_from([*names, "", "000002 ", "new\nline", "n" * 300, "9" * 300, *UNPRINTABLE])
EDGES = [sign * (2**bits - below) for bits in (8, 16, 31, 32, 63, 64, 100) for sign in (1, -1) for below in (0, 1)]
numbers = st.integers(-3, 8) | sampled_from(EDGES) | st.integers()
integers = numbers.map(str) | sampled_from(("-0", "9" * 400, "-" + "9" * 400, "9" * 5_000))
floats = st.floats().map(repr) | sampled_from(listed("0.0  -0.0  0.1  1e-45  1e38  1e39  -1e308  1e400  1e999999999"))
quoted = st.one_of(texts, paths, sampled_from(("x" * 100_000, "é\t" * 1_000))).map(json.dumps)
nested = st.builds(
    lambda pair, depth, close: pair[0] * depth + pair[1] * depth * close,
    sampled_from((("[", "]"), ('{"a":', "}"))),
    sampled_from((50, 500, 1_000, 20_000, 200_000)),
    st.booleans(),
)

# YAML beyond plain values.
ODD_YAML = listed(r"""
    ~  yes  0o7  0x1F  1_000  1__0  +1  1.  .5  ._  =  <<  ''  "  "\  "\ud800"  "\udcff\ud800"  "\x1b[2J"  "\N"
    "\U00110000"  .nan  -.inf  .inf
    2024-13-45  2024-02-30T25:61:61Z  {<<: 1}  {<<: [1]}  {<<: {a: 1}, a: 2}  {<<: &a {<<: *a}}  *nothing
    &a [*a]  &a {b: *a}  &a [&b [*a, *b]]  {? [a] : b}  {? {a: 1} : b}  {null: 1}  {1.5: 2}  {true: 1}  {a: 1, a: 2}
    !unknown x  !!int q  !!set x  !!binary x  !!timestamp x  !!python/object/apply:os.system x  []
    {}  [null]  {a: {b: {c: {}}}}  - a  a: b  --- a  1:90  aGk=
""")
yaml_values = st.one_of(
    integers,
    floats,
    quoted,
    sampled_from(ODD_YAML),
    sampled_from(ODD_YAML),
    st.text("&*!|>%@`\"'#,?:-=<[]{}~.9a \\\n", min_size=1, max_size=8),
    nested,
)
documents = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(characters, max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
json_values = st.one_of(
    integers,
    quoted,
    documents.map(json.dumps),
    file_names.map(json.dumps),
    sampled_from(("null", "true", "[]", "{}", '"x"', '{"a": 1, "a": 2}', "[" + "0," * 5_000 + "0]", "1e999")),
    nested,
)
