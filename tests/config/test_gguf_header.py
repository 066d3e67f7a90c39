"""Truncated, changed and hostile GGUF headers: a ValueError in one line within a second, or the same header."""

import random
import struct
import time
from pathlib import Path

import pytest

from qarl.config.architecture import UnknownFamily, read_gguf
from qarl.config.gguf_header import read_gguf_header

STRING, ARRAY, UINT32, UINT8, FLOAT64 = 8, 9, 4, 0, 12


def text(value: str | bytes) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return entry(key, UINT32, struct.pack("<I", value))


def array(key: str, kind: int, count: int, data: bytes) -> bytes:
    return entry(key, ARRAY, struct.pack("<IQ", kind, count) + data)


def tensor(name: str, *sizes: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, 0)


def gguf(
    entries: list[bytes], tensors: list[bytes] = (), keys: int | None = None, count: int | None = None, version: int = 3
) -> bytes:
    counts = (len(tensors) if count is None else count, len(entries) if keys is None else keys)
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)


MODEL = [
    entry("general.architecture", STRING, text("llama")),
    number("llama.embedding_length", 64),
    number("llama.feed_forward_length", 128),
    number("llama.block_count", 2),
    number("llama.attention.head_count", 4),
    array("tokenizer.ggml.tokens", STRING, 3, text("a") + text("bb") + text("")),
    array("tokenizer.ggml.scores", FLOAT64, 3, bytes(24)),
]
TENSORS = [tensor("token_embd.weight", 64, 3), tensor("blk.0.ffn_up.weight", 64, 128)]

HOSTILE = {
    "a key of 2^60 bytes": gguf([struct.pack("<Q", 2**60) + b"x"]),
    "a text of 2^60 bytes": gguf([entry("k", STRING, struct.pack("<Q", 2**60))]),
    "2^62 tensors": gguf(MODEL, TENSORS, count=2**62),
    "an array of 2^60 texts": gguf([array("k", STRING, 2**60, b"")]),
    "arrays in an array": gguf([array("k", ARRAY, 1, struct.pack("<IQ", UINT8, 1) + b"x")]),
    "a key twice": gguf([*MODEL, number("llama.block_count", 3)]),
    "a tensor of 2^31 dimensions": gguf(MODEL, [text("a") + struct.pack("<I", 2**31)]),
    "an unknown type": gguf([entry("k", 99, b"")]),
    "version 1": gguf(MODEL, version=1),
    "sixteen million zeros of keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**16) + bytes(2**24),
    "an empty array of two million texts": gguf([array("k", STRING, 2**21, bytes(2**24))], keys=2),
    "nothing": b"",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_refused_at_once(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    start = time.process_time()
    with pytest.raises(ValueError, match=r"GGUF|architecture") as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "change",
    [
        number("llama.embedding_length", 0),
        entry("llama.block_count", FLOAT64, struct.pack("<d", 2.0)),
        number("llama.attention.head_count_kv", 3),
        array("llama.attention.head_count_kv", UINT32, 2, bytes(8)),
        entry("llama.rope.freq_base", FLOAT64, struct.pack("<d", float("nan"))),
        number("llama.vocab_size", 0),
        entry("general.architecture", UINT8, b"\1"),
    ],
    ids=range(7),
)
def test_invalid_metadata_is_refused_by_its_key(tmp_path: Path, change: bytes) -> None:
    key = change[8 : 8 + struct.unpack("<Q", change[:8])[0]]
    kept = [one for one in MODEL if not one[8:].startswith(key)]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([*kept, change], TENSORS))
    with pytest.raises(ValueError, match=r"is not valid: |has general.architecture"):
        read_gguf(path)


@pytest.mark.parametrize("untied", [True, False])
def test_a_header_gives_shapes_as_torch_has_them_and_the_architecture(tmp_path: Path, untied: bool) -> None:
    path = tmp_path / "m.gguf"
    more = [number("llama.attention.head_count_kv", 2), number("llama.context_length", 1024)]
    output = [tensor("output.weight", 64, 3)] if untied else []
    path.write_bytes(gguf([*MODEL, *more], [*TENSORS, *output]))
    found = read_gguf_header(path).tensors
    assert {"token_embd.weight": (3, 64), "blk.0.ffn_up.weight": (128, 64)}.items() <= found.items()
    architecture = read_gguf(path)
    assert (architecture.vocab_size, architecture.head_dim, architecture.num_kv_heads) == (3, 16, 2)
    assert architecture.context_length == 1024 and architecture.tied_embeddings == (not untied)


def test_a_header_cut_or_changed_anywhere_is_refused_or_read(tmp_path: Path) -> None:
    path, original, rng = tmp_path / "m.gguf", gguf(MODEL, TENSORS), random.Random(4)
    damaged = [original[:length] for length in range(len(original))]
    for _ in range(300):
        place = rng.randrange(len(original))
        damaged.append(original[:place] + bytes([rng.randrange(256)]) + original[place + 1 :])
    refused = 0
    start = time.process_time()
    for content in damaged:
        path.write_bytes(content)
        try:
            read_gguf(path)
        except UnknownFamily:
            continue
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > len(original)  # every cut, at least
    assert time.process_time() - start < 20
