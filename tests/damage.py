"""Ways to damage a file that qarl reads, drawn from a seed."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ODD_VALUES: list[Any] = [
    *[None, True, False, 0, 1, -1, 3, 2**31, 2**53, 2**63, 2**70, -(2**63), 10**30],
    *[0.5, -0.0, 1e308, -1e308, 1e-320, float("nan"), float("inf")],
    *["", "3", "x", "../x", "/etc/passwd", "a\0b", "²²²", "\ud800", "\u202ex", "x" * 300],
    *[[], [1], [[]], [None], ["a", 1], {}, {"": 0}, {"step": "x"}, [{}], {"a": {"b": [1e308, "2"]}}],
]
ODD_TEXTS = [
    *[b"", b"\0", b"null", b"3", b"[]", b"{}", b'"a"', b"{", b"[" * 5000, b'{"a":' * 5000, b"1" * 6000],
    *[b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"step": 1' + b"0" * 400 + b"}", b'{"step": 1}\n' * 3, b"1e999", b"NaN"],
]


def replaced(value: Any, rng: random.Random) -> Any:
    """Return the JSON value with one of its parts, at any depth, removed, replaced or renamed."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
        return rng.choice(ODD_VALUES)
    if isinstance(value, dict):
        key, copy = rng.choice(list(value)), dict(value)
        way = rng.random()
        if way < 0.25:
            del copy[key]
        elif way < 0.35:
            copy[rng.choice(["../x", "/x", "", "²²²", "a/b", "x" * 300, "state.json"])] = copy.pop(key)
        else:
            copy[key] = replaced(value[key], rng)
        return copy
    index, copy = rng.randrange(len(value)), list(value)
    if rng.random() < 0.2:
        del copy[index]
    else:
        copy[index] = replaced(value[index], rng)
    return copy


def spoil_json(path: Path, rng: random.Random) -> str:
    """Replace a part of a JSON file, or of one line of a JSON-lines file."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    index = rng.randrange(len(lines))
    lines[index] = json.dumps(replaced(json.loads(lines[index]), rng))
    path.write_text("\n".join(lines) + "\n")
    return f"a part of line {index + 1} replaced: {lines[index][:300]}"


def spoil_bytes(path: Path, rng: random.Random) -> str:
    """Cut, flip, insert or replace bytes."""
    data = bytearray(path.read_bytes())
    way = rng.choice(["cut", "flip", "insert", "text", "repeat"])
    place = rng.randrange(len(data)) if data else 0
    if way == "cut":
        data = data[:place]
    elif way == "flip" and data:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif way == "insert":
        data[place:place] = rng.choice(ODD_TEXTS)
    elif way == "text":
        data = bytearray(rng.choice(ODD_TEXTS))
    else:
        data = data * 2
    path.write_bytes(data)
    return f"{way} at {place}"


def spoil_entry(path: Path, rng: random.Random) -> str:
    """Replace a file or directory by something else."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    way = rng.choice(["gone", "directory", "pipe", "dangling link", "loop", "device", "empty file"])
    ways: dict[str, Callable[[], Any]] = {
        "gone": lambda: None,
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "empty file": path.touch,
        "dangling link": lambda: path.symlink_to("nowhere"),
        "loop": lambda: path.symlink_to(path.name),
        "device": lambda: path.symlink_to("/dev/zero"),
    }
    ways[way]()
    return way


def damages(
    seed: int, count: int, json_too: bool
) -> Iterator[tuple[random.Random, Callable[[Path, random.Random], str]]]:
    """Yield `count` random ways to damage a file, each with its own random generator."""
    for number in range(count):
        rng = random.Random(f"{seed}-{number}")
        yield rng, rng.choice([spoil_bytes, spoil_entry, *([spoil_json] * 3 if json_too else [])])
