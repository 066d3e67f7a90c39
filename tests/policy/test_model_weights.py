"""Weights that are not those of the configuration are refused by name, in every format, before anything is loaded."""

import json
import random
import shutil

import pytest
import torch
from damaged_models import FAMILIES, Weights, openings, refusals
from safetensors.torch import load_file

from qarl.config import ModelConfig, QuantConfig
from qarl.config.architecture import read_config_json
from qarl.config.model_fields import refused
from qarl.config.quant import scheme_of
from qarl.config.weight_files import gguf_name
from qarl.errors import UserError
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.policy.load import load_model
from qarl.policy.load_config import load_model_config
from qarl.policy.policy import Policy
from qarl.policy.skeleton import skeleton

SETTINGS = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAULTS = ["removed", "renamed", "added", "cut", "flattened", "emptied", "of another type", "of a layer more"]


def damaged(weights: Weights, fault: str, name: str) -> str:
    """Put a fault into a tensor. Returns the name that an error must say."""
    tensor = weights.pop(name)
    more = {"added": f"extra.{name}", "of a layer more": f"model.layers.2.{name.split('.', 3)[-1]}"}.get(fault, name)
    weights |= {
        "removed": {},
        "renamed": {f"{name}.old": tensor},
        "added": {name: tensor, more: torch.zeros(2, 2)},
        "cut": {name: tensor[:-1].clone()},
        "flattened": {name: tensor.reshape(-1, 1, 1).clone()},
        "emptied": {name: tensor.reshape(-1)[:0].clone()},
        "of another type": {name: tensor.to(torch.int8 if tensor.dtype != torch.int8 else torch.float64)},
        "of a layer more": {name: tensor, more: tensor.clone()},
    }[fault]
    return more


@pytest.mark.parametrize("kind", ["single", "export"])
def test_every_tensor_that_is_not_as_it_should_be_is_named(bases, tmp_path, kind):
    base = Weights.of(bases[kind])
    rng = random.Random(f"weights {kind}")
    for make in FAULTS:
        name, weights = rng.choice(sorted(base)), Weights.of(bases[kind])
        said = damaged(weights, make, name)
        for command, message in refusals(kind, weights.save(tmp_path / make)):
            assert said in message, (make, name, command, message)
            assert make != "emptied" or " is [0], but [" in message


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: [weights.pop(name) for name in sorted(weights) if ".layers.1." in name],
        lambda weights: weights.rename(lambda name: f"transformer.{name}"),
        lambda weights: weights.rename(lambda name: name.removeprefix("model.")),  # a base model without its head
        lambda weights: weights.configure(tie_word_embeddings=False),
        lambda weights: weights.configure(model_type="qwen3", head_dim=16, architectures=["Qwen3ForCausalLM"]),
        lambda weights: weights.clear(),
    ],
)
def test_a_model_that_is_another_than_its_configuration_is_refused(bases, tmp_path, make):
    weights = Weights.of(bases["single"])
    make(weights)
    for _, message in refusals("single", weights.save(tmp_path / "changed")):
        assert "its weights are not those of its config.json" in message
        assert ("save the causal LM" in message) == ("embed_tokens.weight" in weights), message


def test_old_buffers_and_a_tied_head_that_is_the_embedding_may_be_stored(bases, tmp_path):
    weights = Weights.of(bases["single"])
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    buffers = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]  # of old checkpoints
    weights |= {name: torch.ones(8) for name in buffers}
    directory = weights.save(tmp_path / "both")
    for _, opening in openings("single", directory):
        opening()
    weights["lm_head.weight"][-1, -1] += 0.5
    directory = weights.save(tmp_path / "other")
    check, train, quantize = openings("single", directory)
    check[1]()  # which reads headers alone
    for _, opening in (train, quantize):
        with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight, but .*tie_word"):
            opening()


@pytest.mark.parametrize(("kind", "value"), [("single", torch.nan), ("export", torch.inf)])
def test_values_that_are_no_numbers_are_refused_by_name(bases, tmp_path, kind, value):
    base = Weights.of(bases[kind])
    names = [name for name in base if name.endswith(("norm.weight", "0.mlp.up_proj.weight", "up_proj.weight_scale"))]
    for name in sorted(names)[:2]:
        weights = Weights.of(bases[kind])
        weights[name].view(-1)[3] = value
        directory = weights.save(tmp_path / name)
        with pytest.raises(UserError, match=name.removesuffix("_scale").replace(".", r"\.")):
            open_policy(resolve_target(str(directory)), device="cpu")
        if kind == "single":
            model, quant = load_model(ModelConfig(path=str(directory))), QuantConfig(scheme="w8a8")
            with pytest.raises(UserError, match=rf"{name}: 1 of \d+ values are NaN"):
                Policy(model, scheme_of(quant), quant, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True, "head_dim": 32}]
)
def test_the_list_of_tensors_is_that_of_the_model(tmp_path, family, changes):
    changes = {key: value for key, value in changes.items() if key not in refused(family)}
    more = {"max_position_embeddings": 64, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 1}
    settings = SETTINGS | {"model_type": family} | more | changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    architecture = read_config_json(tmp_path / "config.json")
    listed = dict(architecture.tensors())
    model = skeleton(load_model_config(ModelConfig(path=str(tmp_path))))
    assert listed == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert architecture.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_gguf_are_those_of_its_package(tmp_path, family):
    gguf = pytest.importorskip("gguf")
    kind = "llama" if family == "mistral" else family
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == kind)
    names = gguf.get_tensor_name_map(arch, 2)
    biases = {key: True for key in ("attention_bias", "mlp_bias") if key not in refused(family)}
    settings = SETTINGS | {"model_type": family} | biases
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for name, _ in read_config_json(tmp_path / "config.json").tensors():
        module, _, leaf = name.rpartition(".")
        assert gguf_name(name) == f"{names.get_name(module)}.{leaf}"


# --- other formats ------------------------------------------------------------------------------------------------


def test_a_pickle_is_refused_with_the_command_that_converts_it(bases, tmp_path):
    for name in ("consolidated.00.pth", "pytorch_model.bin"):
        directory = shutil.copytree(bases["single"], tmp_path / name)
        torch.save(load_file(directory / "model.safetensors"), directory / name)
        (directory / "model.safetensors").unlink()
        for _, message in refusals("single", directory):
            assert f"{name} is a pickle, which qarl does not read; convert it with: python -c " in message
    exec(message.partition('python -c "')[2].removesuffix('"'), {})
    converted = load_model(ModelConfig(path=f"{directory}-safetensors"))
    expected = load_model(ModelConfig(path=str(bases["single"])))
    assert all(torch.equal(a, b) for a, b in zip(converted.parameters(), expected.parameters(), strict=True))


def test_an_adapter_is_no_model(bases, tmp_path):
    directory = shutil.copytree(bases["single"], tmp_path / "model")
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "other"}')
    for _, message in refusals("single", directory):
        assert "holds an adapter" in message


def test_a_model_in_the_hubs_cache_is_held_to_the_same(bases, tmp_path, monkeypatch):
    repo, commit = tmp_path / "models--some-org--some-model", "a" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    weights = Weights.of(bases["shards"])
    name = "model.layers.1.mlp.up_proj.weight"
    del weights[name]
    weights.save(repo / "snapshots" / commit)
    for module in ("constants", "file_download.constants"):
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        load_model(ModelConfig(path="some-org/some-model"))


def test_two_openings_of_a_model_give_one_digest(bases):
    digests = set()
    for kind in ("single", "shards", "single"):
        target = resolve_target(str(bases[kind]), quant={"scheme": "w8a8"})
        digests.add(open_policy(target, device="cpu").policy.current.manifest().digest())
    assert len(digests) == 1
