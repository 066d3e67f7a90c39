"""Hostile values: numbers, texts, and YAML and JSON of them."""

from __future__ import annotations

import json
import random

from fuzzing.paths import ESCAPE, OVERRIDE, PATHS

TEXTS = (
    "",
    " ",
    "x",
    "\0",
    "a\0b",
    ESCAPE,
    OVERRIDE,
    "\x07",
    "\x1b]0;title\x07",
    "\u2028line",
    "\ufeff",
    "\ud800",
    "a\udc80b",
    "\U000e0041",
    "[bold red]markup[/]",
    "[/]",
    "[link=http://x]y",
    "{prompt:>99999999999}",
    "{0}",
    "{",
    "}",
    "{prompt.__class__}",
    "{prompt!r:{prompt}}",
    "%s%n%d",
    "$HOME",
    "`id`",
    "é" * 100,
    "e\u0301" * 50,
    "x" * 5_000,
    "日本" * 3_000,
    "\n",
    "a\nb",
    "\r\n",
    "a\tb",
    "null",
    "true",
    "1e6",
    "²²²",
    "٣",
    "NaN",
    "-1",
    "re:(",
    "re:(a+)+$",
    "re:.*",
    "task:nothing",
    "reasoning-gym:",
    "reasoning-gym:../x",
    "package:",
    "package:os",
    "package:..",
    "package:nosuch\0",
    "a:b:c",
    "x.py:f",
    "os:system",
    "no.module:f",
    "builtins:eval",
    "math,exact",
    ",",
    "0,",
    "../../../etc/passwd",
    "https://example.com/x",
    "org/name/extra",
    "-",
    "--",
    "a=b",
)

INTEGERS = (
    "0",
    "-1",
    "-0",
    "1",
    "2",
    "3",
    "7",
    "255",
    "65536",
    "1000000007",
    "2147483647",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775809",
    "18446744073709551616",
    "1" + "0" * 30,
    "9" * 400,
    "-" + "9" * 400,
    "9" * 5_000,
)
FLOATS = (
    "0.0",
    "-0.0",
    "0.1",
    "-1.5",
    "1e-320",
    "1e-45",
    "1e6",
    "1e10",
    "1e15",
    "1e38",
    "1e39",
    "1e300",
    "1e308",
    "1.7976931348623157e308",
    "-1e308",
    "1e400",
    ".nan",
    ".inf",
    "-.inf",
    "3.0",
    "1e999999999",
)
FLOATS_OF_OPTIONS = (
    *(text for text in FLOATS if not text.startswith((".", "-."))),
    "nan",
    "inf",
    "-inf",
    "1_0",
    "0x10",
)

# What YAML has beyond plain values.
YAML = (
    "null",
    "~",
    "true",
    "!!int x",
    "!!int 0b2",
    "!!int 1:90",
    "!!float x",
    "!!float 1:1",
    "!!bool maybe",
    "!!null x",
    "!!timestamp 2024-13-45",
    "2024-13-45",
    "2024-02-30T25:61:61Z",
    "!!timestamp x",
    "!!binary '@@@'",
    "!!binary aGk=",
    "!!set {a, b}",
    "!!omap [{a: 1}]",
    "!!omap [a]",
    "!!pairs [a, b]",
    "!!pairs [{a: 1}]",
    "!!seq x",
    "!!map x",
    "!!map [a]",
    "!!str [a]",
    "!!python/object/apply:os.system [id]",
    "!!python/name:os.system",
    "!unknown x",
    "!<tag:yaml.org,2002:int> q",
    "&a [*a]",
    "&a {b: *a}",
    "&a [&b [*a, *b]]",
    "*nothing",
    "<<",
    "{<<: 1}",
    "{<<: [1]}",
    "{<<: {a: 1}, a: 2}",
    "{<<: &a {<<: *a}}",
    "{? [a] : b}",
    "{? {a: 1} : b}",
    "{1: 2}",
    "{null: 1}",
    "{true: 1}",
    "{1.5: 2}",
    "{a: 1, a: 2}",
    "[]",
    "{}",
    "[null]",
    "[[[[]]]]",
    "{a: {b: {c: {}}}}",
    '""',
    "'",
    '"',
    '"\\',
    '"\\ud800"',
    '"\\udcff\\ud800"',
    '"\\x1b[2J"',
    '"\\u202e"',
    '"\\0"',
    '"\\N"',
    '"\\U00110000"',
    "|",
    ">",
    "|9",
    "- a",
    "a: b",
    "[a",
    "{a",
    "]",
    "@",
    "`",
    "%",
    "# c",
    "---",
    "...",
    "--- a\n--- b",
    "?",
    ":",
    "!",
    "&",
    "*",
    "0o7",
    "0x1F",
    "1_000",
    "1__0",
    "+1",
    "1.",
    ".5",
    "._",
    "-",
    "=",
    "0." + "1" * 400,
    "1" * 400 + ".5",
)


def nested(rng: random.Random) -> str:
    """Brackets within brackets."""
    depth = rng.choice((50, 500, 1_000, 20_000, 200_000))
    opening, closing = rng.choice((("[", "]"), ("{a: ", "}"), ("[{a: ", "}]"), ("? ", "")))
    return opening * depth + closing * rng.choice((depth, depth, 0))


def bomb(rng: random.Random) -> str:
    """A few lines that stand for billions of values, by aliases or by merges."""
    levels, width = rng.choice((4, 9, 25)), rng.choice((2, 9))
    if rng.random() < 0.5:
        made = ["&l0 [x]"] + [f"&l{i} [{', '.join([f'*l{i - 1}'] * width)}]" for i in range(1, levels)]
        return "[" + ", ".join(made) + "]"
    made = ["&m0 {k: v}"] + [f"&m{i} {{k{i}: v, <<: [{', '.join([f'*m{i - 1}'] * width)}]}}" for i in range(1, levels)]
    return "[" + ", ".join(made) + "]"


def yaml_value(rng: random.Random) -> tuple[str, str]:
    """(what it is, YAML of a hostile value)."""
    kinds = {
        "integer": 12,
        "float": 12,
        "text": 12,
        "path": 8,
        "yaml": 20,
        "list": 6,
        "mapping": 6,
        "long": 4,
        "nested": 2,
        "bomb": 2,
    }
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    if kind == "integer":
        return kind, rng.choice(INTEGERS)
    if kind == "float":
        return kind, rng.choice(FLOATS)
    if kind == "text":
        return kind, json.dumps(rng.choice(TEXTS))
    if kind == "path":
        return kind, json.dumps(rng.choice(PATHS))
    if kind == "yaml":
        return kind, rng.choice(YAML)
    if kind == "list":
        return kind, "[" + ", ".join([yaml_scalar(rng)] * rng.choice((1, 2, 3, 1_000))) + "]"
    if kind == "mapping":
        return kind, "{" + ", ".join(f"k{i}: {yaml_scalar(rng)}" for i in range(rng.choice((1, 3, 500)))) + "}"
    if kind == "nested":
        return kind, nested(rng)
    if kind == "bomb":
        return kind, bomb(rng)
    return kind, json.dumps(rng.choice("xé\t") * rng.choice((1_000, 100_000)))


def yaml_scalar(rng: random.Random) -> str:
    """YAML of a hostile value that holds no others."""
    return rng.choice((rng.choice(INTEGERS), rng.choice(FLOATS), json.dumps(rng.choice(TEXTS)), "null", "true"))


def json_value(rng: random.Random) -> tuple[str, str]:
    """(what it is, JSON of a hostile value); NaN and infinities as Python writes them."""
    kind = rng.choice(("integer", "float", "text", "path", "list", "mapping", "nested", "literal"))
    if kind == "integer":
        return kind, rng.choice(INTEGERS)
    if kind == "float":
        return kind, rng.choice(
            ("0.0", "-0.0", "1e308", "-1e308", "1e400", "NaN", "Infinity", "-Infinity", "0.5", "1e15")
        )
    if kind in ("text", "path"):
        return kind, json.dumps(rng.choice(TEXTS if kind == "text" else PATHS))
    if kind == "list":
        return kind, rng.choice(("[]", "[null]", "[1, 2]", '["a"]', "[[]]", "[{}]", "[" + "0," * 5_000 + "0]"))
    if kind == "mapping":
        return kind, rng.choice(("{}", '{"a": 1}', '{"": null}', '{"a": {"b": []}}', '{"a": 1, "a": 2}'))
    if kind == "nested":
        depth = rng.choice((100, 1_000, 100_000))
        return kind, rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth))
    return kind, rng.choice(("null", "true", "false", '"x"', "1"))


def shown(text: str, limit: int = 60) -> str:
    """`text` on one line of printable ASCII, shortened."""
    plain = ascii(text)[1:-1]
    return plain if len(plain) <= limit else f"{plain[:limit]}... ({len(text)} characters)"
