"""What other libraries raise over a model's files: a sentence that names the file, the field and the fix."""

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from qarl.checks.check import check_model
from qarl.config import ModelConfig
from qarl.config.weight_files import check_weights
from qarl.errors import UserError
from qarl.inputs.library_errors import DOCUMENTS, foreign_errors
from qarl.policy.load import load_model
from qarl.policy.source import from_pretrained, locate

BARE = re.compile(r"(Key|Type|Attribute|Index)Error: |: '[^' ]*'$")  # a reason that is no sentence


def edited(model: Path, folder: Path, name: str, change) -> ModelConfig:
    shutil.copytree(model, folder / "model")
    file = folder / "model" / name
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    return ModelConfig(path=str(folder / "model"), dtype="float32", device="cpu")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_key_error_about_a_value_of_a_file_names_file_field_and_fix(tiny_model, tmp_path, name):
    """As a table of a library raises it, for whatever kind it does not know."""

    def change(document: dict) -> None:
        document["deep"] = {"er": "some-kind"}

    def loader(*arguments: object, **options: object) -> None:
        {}["some-kind"]

    config = edited(tiny_model("llama"), tmp_path, name, change)
    with pytest.raises(UserError) as caught:
        from_pretrained(config, "config", loader, locate(config))
    assert f'{name}: deep.er = "some-kind", which ' in str(caught.value)
    assert str(caught.value).endswith("does not know; correct it, or restore the file") and not BARE.search(str(caught))


def test_a_kind_of_rope_that_is_not_known_is_named(tiny_model, tmp_path):
    def change(document: dict) -> None:
        document.pop("rope_parameters", None)
        document |= {"rope_theta": 1e4, "rope_scaling": {"type": "su", "rope_theta": 1e4}}

    with pytest.raises(UserError, match=r'config.json .*rope_scaling.(rope_)?type = "su": .*; use default'):
        check_model(edited(tiny_model("llama"), tmp_path, "config.json", change))


def test_an_index_without_metadata_is_named(tiny_model, tmp_path):
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    save_file(tensors, model / "one.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "one.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    config = ModelConfig(path=str(model), dtype="float32", device="cpu")
    architecture = check_model(config).architecture
    for refused in (lambda: check_weights(config, architecture), lambda: load_model(config)):
        with pytest.raises(UserError, match=r"index.json: has no object `metadata`.*add \"metadata\": {} to the file$"):
            refused()


@pytest.mark.parametrize("error", [KeyError("su"), IndexError(), LocalEntryNotFoundError("An error happened")])
def test_an_error_of_a_library_is_a_sentence_with_a_fix(error):
    fixes = r"no such directory.*; check name and connection|\w+ (needs the entry|cannot use the files) .*; restore .*"
    with pytest.raises(UserError, match=f"^here: ({fixes})$"), foreign_errors("here"):
        raise error
