"""The files of a model's weights: an index, headers and shards that are damaged, or that disagree."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from damaged_models import INDEX, refusals
from fuzzing.damage import damage_safetensors
from fuzzing.series import with_draws
from hypothesis.strategies import DrawFn
from safetensors.torch import load_file, save_file

from qarl.config.architecture import read_config_json
from qarl.config.weight_files import require_weights
from qarl.errors import UserError
from qarl.inputs.tensors import read_header

NORM = "model.norm.weight"
PLACES: list[tuple[object, str]] = [  # where the index says that the norm is
    ("../other.safetensors", "must be the name of a file"),
    ("absent.safetensors", "which does not exist"),
    (INDEX, "not a safetensors file"),
    (5, "weight_map.model.norm.weight = 5"),
]
INDICES = [([], "holds a list"), ({"weight_map": {}}, "its weights are not those of its config.json")]


def refused(directory: Path, message: str) -> None:
    for command, said in refusals("shards", directory):
        assert message in said, (command, said)


@pytest.mark.parametrize(("index", "message"), INDICES)
def test_an_index_that_is_none_is_refused(bases, tmp_path, index: Any, message: str):
    directory = shutil.copytree(bases["shards"], tmp_path / "model")
    if isinstance(index, dict):
        index = {"metadata": {}, **index}
    (directory / INDEX).write_text(json.dumps(index))
    refused(directory, message)


def test_an_index_that_contradicts_its_shards_is_refused(bases, tmp_path):
    directory = shutil.copytree(bases["shards"], tmp_path / "model")
    index = json.loads((directory / INDEX).read_text())
    places = index["weight_map"]
    other = next(file for file in places.values() if file != places[NORM])
    cases = [(places | {NORM: place}, message) for place, message in [*PLACES, (other, NORM)]]
    cases += [(places | {"model.more": other}, "names model.more")]
    cases += [({name: file for name, file in places.items() if name != NORM}, f"does not name {NORM}")]
    for changed, message in cases:
        (directory / INDEX).write_text(json.dumps(index | {"weight_map": changed}))
        refused(directory, message)


def test_a_tensor_in_two_shards_is_refused(bases, tmp_path):
    directory = shutil.copytree(bases["shards"], tmp_path / "model")
    files = sorted(directory.glob("*.safetensors"))
    name, tensor = next(iter(load_file(files[0]).items()))
    save_file(load_file(files[1]) | {name: tensor}, files[1])
    refused(directory, f"{name} is in two files")


def test_a_file_that_is_damaged_anywhere_is_refused_or_has_the_same_header(bases, tmp_path):
    original = (bases["single"] / "model.safetensors").read_bytes()
    expected = {name: (t.dtype, t.shape) for name, t in read_header(bases["single"] / "model.safetensors").items()}
    directory = shutil.copytree(bases["single"], tmp_path / "model")
    architecture = read_config_json(directory / "config.json")

    def check(draw: DrawFn) -> None:
        what, damaged = damage_safetensors(draw, original)
        (directory / "model.safetensors").write_bytes(damaged)
        try:
            found = require_weights(directory, architecture)
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert {name: (t.dtype, t.shape) for name, t in found.items()} == expected, what

    for number in range(60):
        with_draws("header", str(number), check)
