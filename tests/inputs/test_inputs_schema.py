"""Schemas: a mutated record is accepted or refused in one line."""

import copy
import random

import pytest

from qarl.inputs.files import Unreadable
from qarl.inputs.schema import Bytes, FileName, Record, Sha256, Step, checked


class Entry(Record):
    bytes: Bytes
    sha256: Sha256


class Manifest(Record):
    step: Step
    files: dict[FileName, Entry]
    score: float = 0.0


GOOD = {"step": 3, "files": {"state.json": {"bytes": 5, "sha256": "a" * 64}}, "score": 0.5, "later": {}}
JUNK = [None, True, -1, 2**70, 1.5, float("nan"), "", "x", "\x1b[31m", [], [1], {}, {"a": []}, "../x", "²²²"]


def test_later_keys_are_ignored_and_mutations_refused_in_one_line():
    assert checked(Manifest, GOOD, "m.json").files["state.json"].bytes == 5
    rng = random.Random(0)
    for _ in range(200):
        value = copy.deepcopy(GOOD)
        target = rng.choice([value, value["files"], value["files"]["state.json"]])
        key = rng.choice(list(target))
        if rng.random() < 0.3:
            del target[key]
        else:
            target[key] = rng.choice(JUNK)
        try:
            checked(Manifest, value, "m.json")
        except Unreadable as error:
            assert str(error).startswith("m.json: ") and "\n" not in str(error)


def test_a_key_with_a_line_break_is_named_in_one_line():
    with pytest.raises(Unreadable, match=r"^m.json: files.a\\nb.bytes is missing .and 1 more.$"):
        checked(Manifest, GOOD | {"files": {"a\nb": {}}}, "m.json")


@pytest.mark.parametrize("name", ["..", "a/b", "/etc/passwd", "a\0"])
def test_names_stay_in_their_directory(name):
    with pytest.raises(Unreadable, match="name of a file in the same directory"):
        checked(Manifest, GOOD | {"files": {name: GOOD["files"]["state.json"]}}, "m.json")


@pytest.mark.parametrize("step", [-1, 2**31, True, 1.0, "3"])
def test_a_step_is_a_count(step):
    with pytest.raises(Unreadable, match="step"):
        checked(Manifest, GOOD | {"step": step}, "m.json")
