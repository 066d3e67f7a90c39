"""What crosses between the pool and its workers, mutated and cut."""

from __future__ import annotations

import json
import random
import struct

import pytest

from qarl.rewards.frames import HEADER, REPLY_BYTES, BadFrame, Frames, frame, pack, parse_reply, unpack


def random_value(rng: random.Random, depth: int = 0):
    kinds = ["none", "bool", "int", "float", "str"] + ["list", "tuple", "dict", "odd dict"] * (depth < 4)
    match rng.choice(kinds):
        case "none":
            return None
        case "bool":
            return rng.random() < 0.5
        case "int":
            return rng.choice([0, -1, 2**63, 10**30, rng.randrange(-99, 99)])
        case "float":
            return rng.choice([0.1, -0.0, 1e308, 5e-324, rng.random()])
        case "str":
            return rng.choice(["", "%", "tuple", "\ud800", "\0", "ö", "'\"\\", "x" * 50])
        case "list":
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case "tuple":
            return tuple(random_value(rng, depth + 1) for _ in range(rng.randrange(4)))
        case "dict":
            return {rng.choice(["a", "b", "%", "items"]): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}
        case _:
            keys = [1, 2.5, None, (1, "a"), "%", "x"]
            return {rng.choice(keys): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def test_values_of_rows_cross_as_they_are():
    rng = random.Random(0)
    for _ in range(3000):
        value = random_value(rng)
        frames = Frames()
        frames.feed(frame({"v": pack(value)}))
        there = unpack(frames.next())["v"]
        assert repr(there) == repr(value)  # types, order and the sign of zero too


def test_frames_come_whole_however_the_bytes_are_cut():
    rng = random.Random(1)
    for _ in range(300):
        values = [random_value(rng) for _ in range(rng.randrange(1, 5))]
        data = b"".join(frame(pack(value)) for value in values)
        frames, texts = Frames(REPLY_BYTES), []
        while data:
            cut = rng.randrange(1, len(data) + 1)
            frames.feed(data[:cut])
            data = data[cut:]
            while (text := frames.next()) is not None:
                texts.append(text)
        assert [repr(unpack(text)) for text in texts] == [repr(value) for value in values]


def test_mutated_replies_are_replies_or_bad_frames():
    rng = random.Random(2)
    good = json.dumps({"request": 5, "kind": "scores", "value": [1.0, -2.5, 3e8]}).encode()
    for _ in range(3000):
        text = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            place = rng.randrange(len(text))
            match rng.randrange(3):
                case 0:
                    text[place] = rng.randrange(256)
                case 1:
                    del text[place]
                case _:
                    text[place:place] = rng.choice([b"[", b"9" * 5000, b"{", b'"', b"NaN", b"1e999", b"\xff"])
        frames = Frames(REPLY_BYTES)
        frames.feed(HEADER.pack(len(text)) + text)
        try:
            number, kind, _ = parse_reply(frames.next())
        except BadFrame:
            continue
        assert type(number) in (int, bool) and type(kind) is str


def test_a_header_over_the_limit_is_refused_before_the_rest_comes():
    frames = Frames(REPLY_BYTES)
    frames.feed(struct.pack(">Q", REPLY_BYTES + 1))
    with pytest.raises(BadFrame, match="16,777,217 bytes"):
        frames.next()
