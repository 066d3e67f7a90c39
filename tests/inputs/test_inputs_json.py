"""JSON from outside is read as by the standard library, or refused in one line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.inputs.files import Unreadable
from qarl.inputs.json import DEPTH, INT_DIGITS, parse_json, read_json_object, strict

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXTS
SCALARS |= st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=12)


@given(VALUES, st.booleans())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_values_come_back_as_they_were_written(value, ascii_only):
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only), "here") == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested deeper"),
        ("[" * (DEPTH + 1) + "]" * (DEPTH + 1), "nested deeper"),
        (str(2**63), "does not fit 64 bits"),
        ("9" * 5000, "too large"),
        ("1e999", "too large for a float"),
        ("NaN", "holds NaN"),
        ('{"a": ["\\ud800"]}', "lone surrogate at a.0"),
        ("", "not valid JSON"),
        (b"\xff{}", "byte 0xff"),
        (b'{"a":\n "\xe2\x82"}', "line 2"),
    ],
)
def test_what_cannot_be_held_is_refused(text, reason):
    with pytest.raises(Unreadable, match=reason):
        parse_json(text, "here")


def test_the_largest_values_are_read_and_options_allow_more():
    text = "[" * DEPTH + "]" * DEPTH
    assert parse_json(text, "here") == json.loads(text)
    assert parse_json("7" * INT_DIGITS, "here", big_integers=True) == int("7" * INT_DIGITS)
    with pytest.raises(Unreadable, match="too large"):
        parse_json("7" * 5000, "here", big_integers=True)
    assert parse_json("[Infinity, -Infinity]", "here", nonfinite=True) == [float("inf"), float("-inf")]
    assert parse_json('"\\ud83d\\ude00"', "here") == "\U0001f600"


def test_a_file_must_hold_an_object_and_strict_json_replaces_what_it_cannot_hold(tmp_path):
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(Unreadable, match="holds a list, expected an object"):
        read_json_object(tmp_path / "a.json")
    value = {"a": [1.5, float("nan"), (float("inf"), {"b": -float("inf")})], "c": "NaN", "d": True}
    assert strict(value) == {"a": [1.5, None, [None, {"b": None}]], "c": "NaN", "d": True}
