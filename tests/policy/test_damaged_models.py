"""Damaged model directories: refused in one line, or a model that loads; never a traceback or a hang."""

import json
import random
import shutil
from typing import Any

import pytest
import torch
import yaml
from damaged_models import Weights, quantized_copy
from fuzzing.values import listed

from qarl.checks.check import check_model
from qarl.config import ModelConfig
from qarl.config.architecture import read_config_json
from qarl.errors import UserError
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.load_config import load_generation_config, load_model_config, stop_token_ids


def one_line(error: pytest.ExceptionInfo[UserError] | UserError) -> str:
    message = str(error.value if isinstance(error, pytest.ExceptionInfo) else error)
    assert "\n" not in message and len(message) < 1200, message
    return message


KEYS = listed("""
    rope_scaling  rope_parameters  sliding_window  layer_types  head_dim  auto_map  quantization_config  dtype  to_dict
    _attn_implementation  num_labels  id2label  output_attentions  return_dict  pruned_heads  problem_type  text_config
    tokenizer_class  chunk_size_feed_forward  use_return_dict  experts_implementation  fusion_config  attribute_map
""")
VALUES = [None, True, -1, 0, 3, 0.5, 1e300, "x", [], [1], {}, {"a": 1}]


def test_a_key_that_a_library_acts_on_is_refused_or_loads(tiny_model, tmp_path):
    directory, rng, loaded = shutil.copytree(tiny_model("qwen2"), tmp_path / "model"), random.Random(1), 0
    original = json.loads((directory / "config.json").read_text())
    for key in KEYS * 2:
        (directory / "config.json").write_text(json.dumps(original | {key: rng.choice(VALUES)}))
        config = ModelConfig(path=str(directory))
        try:
            check_model(config)
            load_tokenizer(config), load_model(config)
            loaded += 1
        except UserError as error:
            one_line(error)
    assert 5 < loaded < 2 * len(KEYS) - 5  # neither everything nor nothing is refused


@pytest.mark.parametrize("content", [b"[]", b"\xff\xfe", b'{"eos_token_id": [1, -1]}'])
def test_a_damaged_generation_config_does_not_lose_the_stop_tokens(tiny_model, tmp_path, content):
    directory = shutil.copytree(tiny_model(), tmp_path / "model")
    (directory / "generation_config.json").write_bytes(content)
    for loader in (load_generation_config, load_model):
        with pytest.raises(UserError) as caught:
            loader(ModelConfig(path=str(directory)))
        assert "generation_config.json" in one_line(caught)


def test_stop_tokens_are_the_generation_configs_or_without_it_the_models(tiny_model, tmp_path):
    directory = shutil.copytree(tiny_model(), tmp_path / "model")
    config = ModelConfig(path=str(directory))
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 40]}')
    tokenizer = load_tokenizer(config)
    for generation in (load_generation_config(config), load_model(config).generation_config):
        assert stop_token_ids(generation, tokenizer) == {1, 40}
    (directory / "generation_config.json").unlink()
    assert stop_token_ids(load_model(config).generation_config, tokenizer) == {1}


def test_a_tokenizer_larger_than_the_model_is_refused(tiny_model, tmp_path):
    directory = shutil.copytree(tiny_model(), tmp_path / "model")
    weights = Weights.of(directory)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:250].clone()
    weights.configure(vocab_size=250)
    smaller = weights.save(tmp_path / "smaller")
    with pytest.raises(UserError, match=r"id 258, but the model has only 250 tokens; use the model's own tokenizer"):
        load_tokenizer(ModelConfig(path=str(smaller)))


# --- code of the model's own --------------------------------------------------------------------------------------


BEYOND = {"AutoConfig": "../evil.Config"}


@pytest.mark.parametrize(("family", "odd"), [("llama", None), ("llama", BEYOND), ("unknown-to-all", None)])
def test_code_in_the_directory_does_not_run_unless_it_is_trusted(tiny_model, tmp_path, family, odd):
    directory, trace = shutil.copytree(tiny_model(), tmp_path / "model"), tmp_path / "ran"
    (directory / "evil.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass Config: pass\nModel = Config\n")
    own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Model", None]}
    for name, values in {"config.json": own, "tokenizer_config.json": own}.items():
        content = json.loads((directory / name).read_text())
        changes = {"model_type": family} if name == "config.json" else {}
        (directory / name).write_text(json.dumps(content | changes | {"auto_map": values if odd is None else odd}))
    for loader in (load_model_config, load_tokenizer, load_model, load_generation_config):
        try:
            loader(ModelConfig(path=str(directory)))
        except UserError as error:
            one_line(error)
    assert not trace.exists()


# --- configurations of published models, as their config.json has them ----------------------------------------------

PUBLISHED: dict[str, dict[str, Any]] = yaml.safe_load(
    """
    llama-3.1-8b: {model_type: llama, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32,
      num_attention_heads: 32, vocab_size: 128256, num_key_value_heads: 8, mlp_bias: false,
      max_position_embeddings: 131072, rope_theta: 500000.0, eos_token_id: [128001, 128009],
      rope_scaling: {factor: 8.0, low_freq_factor: 1.0,
      high_freq_factor: 4.0, original_max_position_embeddings: 8192, rope_type: llama3}}
    mistral-nemo: {model_type: mistral, hidden_size: 5120, intermediate_size: 14336, num_hidden_layers: 40,
      num_attention_heads: 32, vocab_size: 131072, num_key_value_heads: 8, head_dim: 128, sliding_window: null,
      max_position_embeddings: 1024000, rope_theta: 1000000.0}
    qwen2.5-1m: {model_type: qwen2, hidden_size: 3584, intermediate_size: 18944, num_hidden_layers: 28,
      num_attention_heads: 28, vocab_size: 152064, num_key_value_heads: 4, rope_theta: 10000000.0,
      max_position_embeddings: 1010000, sliding_window: 32768, use_sliding_window: false, max_window_layers: 28,
      dual_chunk_attention_config: {chunk_size: 262144}}
    """
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_accepted(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert read_config_json(tmp_path / "config.json").parameters > 4e8
    load_model_config(ModelConfig(path=str(tmp_path)))


# --- paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/" + "x" * 300, "a\0b", "/nowhere/at/all"])
def test_a_path_that_can_be_no_model_is_one_line(path):
    for opening in (
        load_model,
        load_tokenizer,
        load_model_config,
        load_generation_config,
        lambda config: open_policy(resolve_target(config.path)),
    ):
        with pytest.raises(UserError) as caught:
            opening(ModelConfig.model_construct(path=path, gguf_file=None, revision=None, trust_remote_code=False))
        one_line(caught)


def test_home_is_expanded(tiny_model, monkeypatch):
    model = tiny_model()
    monkeypatch.setenv("HOME", str(model.parent))
    assert load_model_config(ModelConfig(path=f"~/{model.name}")).hidden_size == 64


# --- exports ------------------------------------------------------------------------------------------------------


def test_an_export_whose_weight_shape_lies_is_refused(tiny_model, tmp_path):
    out = quantized_copy(tiny_model(), tmp_path / "export", {"scheme": "w4a16", "group_size": 32})
    weights = Weights.of(out)
    weights["model.layers.1.mlp.up_proj.weight_shape"] = torch.tensor([64, 32])
    changed = weights.save(tmp_path / "changed")
    with pytest.raises(UserError, match=r"model.layers.1.mlp.up_proj.weight"):
        open_policy(resolve_target(str(changed), verify_digests=False), device="cpu")


# --- GGUF ---------------------------------------------------------------------------------------------------------
