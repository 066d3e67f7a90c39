"""Damage to a file as bytes, whatever it holds, and to YAML and JSON as text."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

from fuzzing.values import bomb, json_value, nested, shown, yaml_value


def damage_bytes(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """(what was done, the damaged bytes)."""
    kind = rng.choice(
        (
            "flip",
            "flips",
            "truncate",
            "drop",
            "double",
            "insert",
            "utf-8",
            "surrogate",
            "nul",
            "empty",
            "noise",
            "bom",
            "crlf",
            "utf-16",
        )
    )
    place = int(rng.random() * len(data))
    if kind == "flip":
        return f"bit flipped at {place}", _flipped(data, place, rng.randrange(8))
    if kind == "flips":
        for _ in range(20):
            data = _flipped(data, int(rng.random() * len(data)), rng.randrange(8))
        return "20 bits flipped", data
    if kind == "truncate":
        return f"truncated at {place}", data[:place]
    if kind == "drop":
        return f"bytes dropped at {place}", data[:place] + data[place + rng.choice((1, 16, 1_000)) :]
    if kind == "double":
        return "twice the contents", data + data
    if kind == "insert":
        return f"noise at {place}", data[:place] + rng.randbytes(rng.choice((1, 16))) + data[place:]
    if kind == "utf-8":
        return f"invalid UTF-8 at {place}", data[:place] + rng.choice(
            (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8")
        ) + data[place:]
    if kind == "surrogate":
        return f"escaped surrogate at {place}", data[:place] + b'"\\ud800"' + data[place:]
    if kind == "nul":
        return f"NUL at {place}", data[:place] + b"\0" + data[place:]
    if kind == "bom":
        return "byte order mark", b"\xef\xbb\xbf" + data
    if kind == "crlf":
        return "CRLF", data.replace(b"\n", b"\r\n")
    if kind == "utf-16":
        return "UTF-16", data.decode(errors="replace").encode("utf-16")
    return ("noise alone", rng.randbytes(2_000)) if kind == "noise" else ("emptied", b"")


def damage_yaml(rng: random.Random, text: str) -> tuple[str, bytes]:
    """(what was done, the damaged document)."""
    lines = text.split("\n")
    row = int(rng.random() * len(lines))
    kind = rng.choice(
        (
            "bytes",
            "value",
            "value",
            "top",
            "repeat",
            "drop line",
            "indent",
            "tab",
            "documents",
            "bomb",
            "nested",
            "anchor",
            "tag",
            "character",
        )
    )
    if kind == "bytes":
        return damage_bytes(rng, text.encode())
    if kind == "value":
        what, value = yaml_value(rng)
        key = lines[row].partition(":")[0]
        return _in_text(f"line {row} given {what} {shown(value)}", [*lines[:row], f"{key}: {value}", *lines[row + 1 :]])
    if kind == "top":
        what, value = yaml_value(rng)
        return f"nothing but {what} {shown(value)}", _encoded(value)
    if kind == "repeat":
        return _in_text(f"line {row} twice", [*lines[:row], lines[row], *lines[row:]])
    if kind == "drop line":
        return _in_text(f"line {row} dropped", [*lines[:row], *lines[row + 1 :]])
    if kind == "indent":
        return _in_text(
            f"line {row} indented", [*lines[:row], " " * rng.choice((1, 3, 40)) + lines[row], *lines[row + 1 :]]
        )
    if kind == "tab":
        return _in_text(f"tab in line {row}", [*lines[:row], "\t" + lines[row].lstrip(), *lines[row + 1 :]])
    if kind == "documents":
        return _in_text(f"second document at line {row}", [*lines[:row], "---", *lines[row:]])
    if kind == "bomb":
        value = bomb(rng)
        return _in_text(f"bomb {shown(value)}", [*lines, f"{rng.choice(('bomb', 'x', 'notes'))}: {value}"])
    if kind == "nested":
        return _in_text("nested deeply", [*lines, f"x: {nested(rng)}"])
    if kind == "anchor":
        return _in_text("merges into itself", [*lines, "a: &a", "  b: *a", "  <<: *a"])
    if kind == "tag":
        tag = rng.choice(("!!python/object:os.system", "!!int", "!!set", "!!omap", "!!binary", "!!timestamp", "!x"))
        key, _, value = lines[row].partition(":")
        return _in_text(f"line {row} tagged {tag}", [*lines[:row], f"{key}: {tag} {value}", *lines[row + 1 :]])
    char = rng.choice("\0\x07\x1b\x85\u2028\u202e\ufeff\ufffe\ud800{}[]&*!|>%@`\"'#,?")
    column = int(rng.random() * (len(lines[row]) + 1))
    return _in_text(
        f"{char!a} in line {row}", [*lines[:row], lines[row][:column] + char + lines[row][column:], *lines[row + 1 :]]
    )


def damage_json(rng: random.Random, text: str) -> tuple[str, bytes]:
    """(what was done, the damaged JSON or JSON lines): bytes, or one value replaced, or a key renamed."""
    kind = rng.choice(("bytes", "value", "value", "value", "whole", "line", "character"))
    if kind == "bytes":
        return damage_bytes(rng, text.encode())
    what, value = json_value(rng)
    if kind == "whole":
        return f"nothing but {what} {shown(value)}", value.encode()
    if kind == "line":
        lines = text.split("\n")
        row = int(rng.random() * len(lines))
        return f"line {row} is {what} {shown(value)}", "\n".join([*lines[:row], value, *lines[row + 1 :]]).encode()
    if kind == "character":
        place = int(rng.random() * len(text))
        char = rng.choice('{}[]",:\\0-e.\n')
        return f"{char!a} at {place}", (text[:place] + char + text[place + 1 :]).encode()
    spans = _value_spans(text)
    if not spans:
        return f"nothing but {what} {shown(value)}", value.encode()
    begin, end = spans[int(rng.random() * len(spans))]
    return (
        f"value {shown(text[max(0, begin - 30) : end], 50)} becomes {what} {shown(value)}",
        (text[:begin] + value + text[end:]).encode(),
    )


def damage_entry(rng: random.Random, path: Path) -> str:
    """Replace a file or folder by something else of that name. Returns what."""
    kind = rng.choice(
        ("removed", "folder", "dangling link", "FIFO", "zero device", "link to itself", "empty", "another")
    )
    neighbours = sorted(p for p in path.parent.iterdir() if p != path and p.is_file() and not p.is_symlink())
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to("nowhere/at/all")
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "zero device":
        os.symlink("/dev/zero", path)
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "empty":
        path.touch()
    elif kind == "another" and neighbours:
        other = neighbours[int(rng.random() * len(neighbours))]
        shutil.copyfile(other, path)
        return f"{path.name} replaced: {other.name}"
    return f"{path.name} replaced: {kind}"


def replaced(rng: random.Random, record: Any) -> tuple[str, str]:
    """Put the mark @0@ at a key of nested data; returns the key's path and JSON for the mark."""
    path: list[str] = []
    here = record
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        key = "step" if rng.random() < 0.2 and "step" in keys else keys[int(rng.random() * len(keys))]
        path.append(str(key))
        if isinstance(here[key], dict | list) and here[key] and rng.random() < 0.8:
            here = here[key]
            continue
        here[key] = "@0@"
        return ".".join(path), json_value(rng)[1]


def _value_spans(text: str) -> list[tuple[int, int]]:
    """Places of scalars in JSON text: strings that are no keys, numbers, literals; and keys, to rename."""
    return [match.span() for match in re.finditer(r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null', text)]


def _flipped(data: bytes, place: int, bit: int) -> bytes:
    if not data:
        return data
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def _in_text(what: str, lines: list[str]) -> tuple[str, bytes]:
    return what, _encoded("\n".join(lines))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
