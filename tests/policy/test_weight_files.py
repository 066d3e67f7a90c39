"""The files of a model's weights: an index, headers and shards that are damaged, or that disagree."""

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from damaged_models import refusals
from safetensors.torch import load_file, save_file

from qarl.config.architecture import read_config_json
from qarl.config.weight_files import require_weights
from qarl.errors import UserError
from qarl.inputs.tensors import read_header

# --- shards and their index ---------------------------------------------------------------------------------------


def _index(directory: Path, change: Callable[[dict], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    replaced = change(index)
    path.write_text(json.dumps(index if replaced is None else replaced))


NORM = "model.norm.weight"
INDICES: list[tuple[Callable[[dict], object], str]] = [
    (lambda index: index["weight_map"].update({NORM: "../other.safetensors"}), "must be the name of a file"),
    (lambda index: index["weight_map"].update({NORM: "/etc/passwd"}), "must be the name of a file"),
    (lambda index: index["weight_map"].update({NORM: "absent.safetensors"}), "which does not exist"),
    (lambda index: index["weight_map"].update({NORM: "model.safetensors.index.json"}), "not a safetensors file"),
    (lambda index: index["weight_map"].update({NORM: ""}), "must be the name of a file"),
    (lambda index: index["weight_map"].update({NORM: 5}), "weight_map.model.norm.weight = 5"),
    (lambda index: index["weight_map"].update({"model.more": index["weight_map"][NORM]}), "names model.more"),
    (lambda index: index["weight_map"].pop(NORM) and None, "does not name model.norm.weight"),
    (
        lambda index: index["weight_map"].update(
            {NORM: next(file for file in index["weight_map"].values() if file != index["weight_map"][NORM])}
        ),
        NORM,
    ),
    (lambda index: index["weight_map"].clear(), "its weights are not those of its config.json"),
    (lambda index: [], "holds a list"),
    (lambda index: 5, "holds a number"),
    (lambda index: {"weight_map": []}, "weight_map = []"),
    (lambda index: {"weight_map": {NORM: {"a": "b"}}}, "weight_map.model.norm.weight"),
    (lambda index: {}, "weight_map is missing"),
    (lambda index: {"weight_map": None}, "weight_map = null"),
]


@pytest.mark.parametrize(("change", "message"), INDICES, ids=range(len(INDICES)))
def test_an_index_that_is_wrong_is_refused(bases, tmp_path, change, message):
    directory = shutil.copytree(bases["shards"], tmp_path / "model")
    _index(directory, change)
    for command, said in refusals("shards", directory):
        assert message in said, (command, said)


def test_a_tensor_in_two_shards_is_refused(bases, tmp_path):
    directory = shutil.copytree(bases["shards"], tmp_path / "model")
    files = sorted(directory.glob("*.safetensors"))
    name, tensor = next(iter(load_file(files[0]).items()))
    save_file(load_file(files[1]) | {name: tensor}, files[1])
    for _, said in refusals("shards", directory):
        assert f"{name} is in two files" in said


# --- headers ------------------------------------------------------------------------------------------------------


def _header(entries: object, data: bytes = b"", length: int | None = None) -> bytes:
    encoded = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(encoded) if length is None else length).to_bytes(8, "little") + encoded + data


def _entry(start: int, end: int, shape: list, dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS = [
    b"",
    b"\x08",
    _header({}, length=2**60),
    _header({}, length=2**63),
    _header({}, length=2**31),
    _header(b"{" * 8),
    _header([]),
    _header(5),
    _header(b"[" * 100_000),
    _header(b'{"a":' * 50_000),
    _header(b"\xff\xfe"),
    _header({"a": _entry(0, 8, [2]), "b": _entry(4, 12, [2])}, bytes(12)),
    _header({"a": _entry(0, 8, [2]), "b": _entry(12, 20, [2])}, bytes(20)),
    _header({"a": _entry(0, 8, [2])}, bytes(4)),
    _header({"a": _entry(0, 8, [2])}, bytes(12)),
    _header({"a": _entry(8, 0, [2])}, bytes(8)),
    _header({"a": _entry(0, 8, [3])}, bytes(8)),
    _header({"a": _entry(0, 8, [-2])}, bytes(8)),
    _header({"a": _entry(0, 8, [2**62, 2**62])}, bytes(8)),
    _header({"a": _entry(0, 8, [2.0])}, bytes(8)),
    _header({"a": _entry(0, 8, ["2"])}, bytes(8)),
    _header({"a": _entry(0, 8, [2], "F99")}, bytes(8)),
    _header({"a": _entry(0, 8, [2], 5)}, bytes(8)),
    _header({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    _header({"a": 5}),
    _header({"a": None}),
    _header({"a": _entry(0, 8, [1] * 5000)}, bytes(8)),
    _header(b'{"a": ' + b"9" * 5000 + b"}"),
]


@pytest.mark.parametrize("content", HEADERS, ids=range(len(HEADERS)))
def test_a_header_that_is_damaged_is_refused_at_once(bases, tmp_path, content):
    directory = shutil.copytree(bases["single"], tmp_path / "model")
    (directory / "model.safetensors").write_bytes(content)
    start = time.monotonic()
    for _, said in refusals("single", directory):
        assert "model.safetensors" in said
    assert time.monotonic() - start < 30


def test_a_header_with_random_bytes_changed_is_refused_or_the_same(bases, tmp_path):
    rng = random.Random(11)
    original = (bases["single"] / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(original[:8], "little")
    expected = {name: (t.dtype, t.shape) for name, t in read_header(bases["single"] / "model.safetensors").items()}
    directory = shutil.copytree(bases["single"], tmp_path / "model")
    architecture = read_config_json(directory / "config.json")
    for _ in range(300):
        damaged = bytearray(original)
        for _ in range(rng.choice([1, 1, 3])):
            damaged[rng.randrange(length)] = rng.randrange(256)
        if rng.random() < 0.2:
            damaged = damaged[: rng.randrange(len(damaged))]
        (directory / "model.safetensors").write_bytes(damaged)
        try:
            found = require_weights(directory, architecture)
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert {name: (t.dtype, t.shape) for name, t in found.items()} == expected
