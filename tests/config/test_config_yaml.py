"""Reading and writing YAML: numbers, duplicate keys, broken files, round trips."""

import pytest
import yaml

from qarl.config import Config, load_config
from qarl.config.yaml_io import dump_yaml, parse_yaml
from qarl.errors import UserError

SCALARS = {
    **{"1e-6": 1e-6, "1E6": 1e6, "-2.5e+3": -2500.0, ".5": 0.5, "1.": 1.0, "1.0e-06": 1e-6, ".inf": float("inf")},
    **{"7": 7, "-7": -7, "1_000": 1000, "0": 0, "true": True, "~": None, "": None, "null": None, "'1e-6'": "1e-6"},
    **{text: text for text in ("010", "1:30", "no", "on", "2024-01-01", "e5", "1e", "<", "0x10", "0o7", "1:30:00")},
    **{"!!int 12": 12, "!!float 1": 1.0, "!!str 12": "12", "!!bool true": True, "!!null ''": None, "!!seq [1]": [1]},
    **{"!!map {a: 1}": {"a": 1}, "9223372036854775807": 2**63 - 1, "-9223372036854775808": -(2**63)},
    **{"2024-13-45": "2024-13-45", "\ufeffa": "a", r'"\x07"': "\x07", "1e-400": 0.0},
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items(), ids=repr)
def test_scalars_are_those_of_yaml_1_2(text, value):
    parsed = parse_yaml(text, "t")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "value", ["1e-6", "no", "1:30", "010", "null", "~", "", "<<", "2024-01-01", "a: b", "{x}", "é\n"]
)
def test_strings_that_look_like_something_else_are_quoted_for_both_yaml_versions(value):
    text = dump_yaml({"key": value})
    assert parse_yaml(text, "t") == {"key": value}
    assert yaml.safe_load(text) == {"key": value}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n  b: [{c: 1, c: 2}]", "t: a.b.0.c: line 2: the key is already in line 2"),
        ("a: {1: x}", "t: a: line 1: key 1 must be a string; put it in quotes"),
    ],
)
def test_broken_yaml_is_refused_with_its_place(text, message):
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "t")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_path_must_be_a_file_and_an_empty_section_means_its_defaults(minimal):
    with pytest.raises(UserError, match="no such file"):
        load_config(minimal.with_name("absent.yaml"))
    with pytest.raises(UserError, match="is a directory, not a file"):
        load_config(minimal.parent)
    minimal.write_text(minimal.read_text() + "quant:\nlogging:\n")
    assert load_config(minimal).quant.scheme == "w4a16"


def test_to_yaml_shows_every_section(load):
    assert list(yaml.safe_load(load().to_yaml())) == list(Config.model_fields)
