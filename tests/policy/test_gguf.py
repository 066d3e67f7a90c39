"""A GGUF file and its kept conversion give the same configuration, tokens and weights."""

import copy
from pathlib import Path

import pytest
import torch
from damaged_models import Weights, gguf_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from qarl.config import ModelConfig
from qarl.exporting.job import export_target
from qarl.inference.masters import open_masters
from qarl.inference.target import resolve_target
from qarl.inputs import files
from qarl.policy import load, load_config
from qarl.policy.load import load_model, load_tokenizer, model_weights
from qarl.policy.load_config import load_model_config
from qarl.storage import conversions
from qarl.training.run_identity import tensors_digest

pytest.importorskip("gguf")


@pytest.fixture
def tiny(tiny_model, tmp_path) -> ModelConfig:
    path = gguf_of(Weights.of(tiny_model()), tmp_path / "model" / "m.gguf")
    return ModelConfig(path=str(path.parent), gguf_file="m.gguf")


@pytest.fixture
def empty(monkeypatch, tmp_path) -> None:
    """A place of its own for what is converted."""
    monkeypatch.setenv("QARL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def another_process():
    """Forgets what this process has proved."""

    def forget() -> None:
        files._digests.clear()
        load_config._gguf_config.cache_clear()

    forget()
    yield forget
    forget()


def without_keeping(monkeypatch) -> None:
    for module in (load, load_config):
        monkeypatch.setattr(module, "kept", lambda source, *arguments: source)
    load_config._gguf_config.cache_clear()


def parse_forbidden(monkeypatch) -> None:
    real = load_config.from_pretrained

    def ask(config, what, loader, source, **options):
        assert source.gguf_file is None, "the GGUF file was parsed"
        return real(config, what, loader, source, **options)

    for module in (load, load_config):
        monkeypatch.setattr(module, "from_pretrained", ask)


def same_models(one: PreTrainedModel, other: PreTrainedModel) -> None:
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert list(mine) == list(theirs) and type(one) is type(other)
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype == torch.float32 and torch.equal(tensor, theirs[name]), name
    for (name, buffer), (_, expected) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    assert tensors_digest(mine.items()) == tensors_digest(theirs.items())  # by which a run knows its base model
    assert one.config.to_json_string() == other.config.to_json_string()
    assert one.generation_config.to_dict() == other.generation_config.to_dict()


def test_the_weights_and_the_configuration_are_the_same_with_and_without(tiny, empty, another_process, monkeypatch):
    first, config = load_model(tiny), load_model_config(tiny)
    another_process()
    with monkeypatch.context() as patch:
        parse_forbidden(patch)
        second, again = load_model(tiny), load_model_config(tiny)
    without_keeping(monkeypatch)
    plain = load_model(tiny)
    for found in (first, second):
        same_models(found, plain)
    expected = load_model_config(tiny)
    for found in (config, again):
        assert found.to_dict() == expected.to_dict() and found.name_or_path == expected.name_or_path


def test_masters_are_read_one_at_a_time_and_are_the_same(tiny, empty, another_process, monkeypatch):
    assert model_weights(tiny).files.keys() == dict(load_model(tiny).named_parameters()).keys()
    monkeypatch.setattr("qarl.inference.target._model", lambda values: tiny)
    masters = open_masters(resolve_target(tiny.path))
    without_keeping(monkeypatch)
    assert model_weights(tiny) is None
    for name, parameter in load_model(tiny).named_parameters():
        assert torch.equal(masters.read(name), parameter)


def test_a_gguf_file_is_quantized_to_a_checkpoint_that_transformers_loads(
    tiny, empty, another_process, monkeypatch, tmp_path
):
    monkeypatch.setattr("qarl.inference.target._model", lambda values: tiny)
    target = resolve_target(tiny.path, quant={"scheme": "w4a16", "group_size": 32})
    export_target(target, tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=10**9)
    model, plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), load_model(tiny)
    assert type(model) is type(plain)
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]))  # the first forward decompresses
    for name, weight in plain.named_parameters():
        found = model.get_parameter(name).float()
        assert (found - weight).norm() < 0.2 * weight.norm(), name
    ours, expected = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(tiny)
    assert ours("a b").input_ids == expected("a b").input_ids and ours.eos_token_id == expected.eos_token_id


def test_a_damaged_conversion_is_never_loaded(tiny, empty, another_process):
    expected = copy.deepcopy(load_model(tiny))  # whose tensors are the mapped file
    (weights,) = conversions.conversions_directory().glob("*/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-5] ^= 0x40
    weights.write_bytes(data)
    another_process()
    same_models(load_model(tiny), expected)
    assert weights.read_bytes() != data


def test_a_conversion_that_cannot_be_kept_gives_the_same_model(tiny, empty, another_process, monkeypatch, caplog):
    expected = load_model(tiny)
    another_process()
    monkeypatch.setenv("QARL_CACHE", str(Path(tiny.path) / "m.gguf"))  # a file
    same_models(load_model(tiny), expected)
    assert len(caplog.records) == 1 and "cannot be kept" in caplog.text
