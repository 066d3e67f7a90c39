"""Hostile YAML is refused in one line with its place, within seconds; accepted YAML is read back unchanged."""

import math
import re
import time

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qarl.config import load_config
from qarl.config.yaml_io import DEPTH, NODES, YAML_BYTES, dump_yaml, parse_yaml
from qarl.errors import UserError
from qarl.utils.text import visible

PLACE = re.compile(r"^t: (line \d+, column \d+: |has [\d,]+ characters|\S+: line \d+: )")
SOON_S = 3.0  # takes 1 s on an idle machine


def refused(text: str, place: str = "t") -> str:
    """Return the one line about a text, after checking that it took less than SOON_S of CPU time."""
    start = time.process_time()
    with pytest.raises(UserError) as caught:
        parse_yaml(text, place)
    assert time.process_time() - start < SOON_S
    line = str(caught.value)
    assert "\n" not in line and len(line) < 400
    return line


def bomb(levels: int, width: int, merge: bool) -> str:
    """Each level holds the one before it `width` times."""
    lines = ["a0: &a0 {k: v}"]
    for level in range(1, levels):
        inner = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} " + (f"{{k{level}: 1, <<: [{inner}]}}" if merge else f"[{inner}]"))
    return "\n".join(lines)


HOSTILE = {
    "alias bomb": bomb(30, 9, merge=False),
    "merge bomb": bomb(60, 2, merge=True),
    "text bomb": f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]",
    "contains itself": "a: &x [1, *x]",
    "unknown alias": "a: *x",
    "brackets": "a: " + "[" * 5_000,
    "many values": "a: [" + "1, " * NODES + "1]",
    "long": "a: " + "x" * YAML_BYTES,
    "tag int": "a: !!int x",
    "tag binary": "a: !!binary aGk=",
    "list tagged map": "a: !!map [1]",
    "python": "a: !!python/name:os.system",
    "integer of 5000 digits": "a: " + "9" * 5000,
    "float overflow": "a: 1e400",
    "surrogate": r'a: "\ud800"',
    "far beyond unicode": r'a: "\UFFFFFFFF"',
    "control character": "a: \x07",
    "nul": "a: \0",
    "two documents": "a: 1\n---\nb: 2",
    "version of many digits": "%YAML 1." + "9" * 5000 + "\n---\na: 1",
    "tab": "a:\n\t- b",
    "merge of text": "a: {<<: b}",
    "key that is a list": "a: {[1]: 2}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_one_line_with_its_place(name):
    assert PLACE.match(refused(HOSTILE[name]))


def test_nesting_is_accepted_up_to_the_limit_and_a_thousand_faults_are_21_lines():
    with pytest.raises(UserError) as caught:
        parse_yaml("\n".join("a: 1" for _ in range(1000)), "t")
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and lines[-1] == "t: and 979 more faults"
    assert "deeper" in refused("[" * (DEPTH + 1) + "]" * (DEPTH + 1))
    parse_yaml("[" * DEPTH + "]" * DEPTH, "t")


def test_uses_of_an_alias_are_copies_and_the_first_of_several_merges_wins():
    data = parse_yaml("a: &x {b: [1]}\nc: *x\nd: {<<: *x}", "t")
    data["a"]["b"].append(2)
    assert data["c"] == data["d"] == {"b": [1]}
    text = "a: &a {k: 1, l: 1}\nb: &b {k: 2, m: 2}\nc: {m: 3, <<: [*a, *b]}"
    assert parse_yaml(text, "t")["c"] == {"k": 1, "l": 1, "m": 3} == yaml.safe_load(text)["c"]


CHARACTERS = "a \n\r\t\\\"':#-{}[&*!|>%@`,?~=<0.e_é"
CHARACTERS += "\0\x07\x1b\x7f\x85\xa0\u2028\u2029\u202e\ufeff\ufffe\uffff\U000e0041\U0001f600"
WORDS = ["", "- a", "a: b", "# c", "\n\n", " lead", "trail ", "é\n", "\ud7ff", "x" * 300, "word " * 60]
WORDS += ["null", "true", "no", "1e-6", "0x1", "1:30", "2024-01-01", "<<", "---", "...", "=", "1_000", ".inf"]
TEXTS = st.sampled_from(WORDS) | st.text(CHARACTERS, max_size=12) | st.text(CHARACTERS, min_size=200, max_size=200)
FLOATS = st.sampled_from([-0.0, 5e-324, 1.7976931348623157e308, 1e22, 1e16, math.pi, 1e-6, 123456789.0])
FLOATS |= st.floats(allow_nan=False, allow_infinity=False)
SCALARS = TEXTS | st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | FLOATS
VALUES = st.deferred(lambda: SCALARS | st.lists(VALUES, max_size=3) | st.dictionaries(TEXTS, VALUES, max_size=3))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(TEXTS, VALUES, max_size=3))
def test_what_is_written_is_read_back_as_it_was(data):
    text = dump_yaml(data)
    again = parse_yaml(text, "t")
    assert again == data and repr(again) == repr(data)
    assert visible(text, keep_newlines=True) == text  # nothing in it drives a terminal


def test_a_configuration_too_large_for_its_own_yaml_is_refused(minimal):
    text = minimal.read_text().replace("[{name: exact}]", "[{name: exact, options: {a: %s}}]")
    minimal.write_text(text % ("'" + "\ufeff" * 80_000 + "'"))
    with pytest.raises(UserError, match=rf"^{minimal}: takes [\d,]+ bytes with its defaults; at most"):
        load_config(minimal)
    minimal.write_text(text % ("'" + "x" * 90_000 + "'"))
    load_config(minimal)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: \xff", "not UTF-8 text .line 1, byte 0xff at 3"),
        (b"a: b\n" * 10**6, "holds more than 262,144 bytes"),
        (b"", "the file is empty"),
        (b"\xef\xbb\xbf- a", "holds a list"),
        (b"\0", "line 1, column 1: not valid YAML: the character U.0000"),
    ],
)
def test_bytes_that_are_no_configuration_are_one_line(minimal, content, message):
    minimal.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_config(minimal)
    assert "\n" not in str(caught.value)
