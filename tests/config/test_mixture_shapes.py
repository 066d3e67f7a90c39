"""Shapes of mixtures of experts from config.json, and memory of their runs, against counts written out by hand."""

import json
import math
import time

import pytest
import yaml
from estimates import config

from qarl.config.architecture import Architecture, read_config_json
from qarl.memory import activations as counted
from qarl.memory import estimate as memory

# Qwen3-30B-A3B, as published.
LARGE = yaml.safe_load(
    """
    {model_type: qwen3_moe, decoder_sparse_step: 1, head_dim: 128, hidden_size: 2048, intermediate_size: 6144,
     max_position_embeddings: 40960, mlp_only_layers: [], moe_intermediate_size: 768, norm_topk_prob: true,
     num_attention_heads: 32, num_experts: 128, num_experts_per_tok: 8, num_hidden_layers: 48,
     num_key_value_heads: 4, tie_word_embeddings: false, vocab_size: 151936}
    """
)
# Qwen1.5-MoE-A2.7B, as published.
WITH_SHARED = yaml.safe_load(
    """
    {model_type: qwen2_moe, decoder_sparse_step: 1, hidden_size: 2048, intermediate_size: 5632,
     max_position_embeddings: 8192, max_window_layers: 21, moe_intermediate_size: 1408, norm_topk_prob: false,
     num_attention_heads: 16, num_experts: 60, num_experts_per_tok: 4, num_hidden_layers: 24,
     num_key_value_heads: 16, shared_expert_intermediate_size: 5632, sliding_window: 32768,
     tie_word_embeddings: false, use_sliding_window: false, vocab_size: 151936}
    """
)


@pytest.fixture
def read(tmp_path):
    def architecture(base=LARGE, **changes) -> Architecture:
        (tmp_path / "config.json").write_text(json.dumps(base | changes))
        return read_config_json(tmp_path / "config.json")

    return architecture


def test_a_published_model_has_its_parameters(read):
    found = read()
    assert found.parameters == 30_532_122_624
    assert len(found.linears()) == 48 * (4 + 3 * 128)
    assert found.matrix_parameters == 48 * (2 * 32 * 128 + 2 * 4 * 128 + 128 * 3 * 768) * 2048
    assert sum(1 for name, _ in found.tensors() if name.endswith("mlp.gate.weight")) == 48


def test_a_shared_expert_is_a_layers_own_mlp_with_a_gate(read):
    found = read(WITH_SHARED)
    assert found.parameters == 14_315_784_192
    assert found.multiplied_parameters + found.embedding_parameters == pytest.approx(2.7e9, rel=0.01)
    shapes = dict(found.tensors())
    block = "model.layers.23.mlp"
    assert shapes[f"{block}.shared_expert.up_proj.weight"] == (5632, 2048)
    assert shapes[f"{block}.shared_expert.down_proj.weight"] == (2048, 5632)
    assert shapes[f"{block}.shared_expert_gate.weight"] == (1, 2048)
    assert shapes[f"{block}.experts.59.down_proj.weight"] == (2048, 1408)
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == (2048,)
    assert sum(math.prod(shape) for shape in shapes.values()) == found.parameters
    of_default = {key: value for key, value in WITH_SHARED.items() if "expert" not in key and "moe_" not in key}
    assert read(of_default | {"model_type": "qwen2_moe"}) == found  # the defaults of transformers


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"qkv_bias": False}, "qkv_bias"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0"),
        ({"layer_types": ["sliding_attention"] * 24}, "it is 0 or use_sliding_window is false"),
        ({"use_sliding_window": True, "sliding_window": 0}, "it is 0 or use_sliding_window is false"),
    ],
)
def test_impossible_settings_of_a_shared_expert_are_refused(read, changes, says):
    with pytest.raises(ValueError, match=says):
        read(WITH_SHARED, **changes)
    assert read(WITH_SHARED, sliding_window=0).mixture  # as transformers writes it if no layer has a window


def test_config_json_names_the_layers_with_an_mlp(read):
    found = read(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3], intermediate_size=512)
    assert found.mixture is not None
    assert found.mixture.layers == {1, 5}
    assert found.dense_layers == 4
    shapes = {linear.name: linear[1:] for linear in found.linears()}
    assert shapes["model.layers.3.mlp.gate_proj"] == (512, 2048)
    assert shapes["model.layers.5.mlp.experts.127.down_proj"] == (2048, 768)


def test_codes_of_a_large_mixture_are_counted_in_time(read):
    section = {"scheme": "w4a16", "group_size": 128}
    given = config(quant=section, optim={"offload": "all"}, train={"micro_batch_tokens": 4096})
    start = time.process_time()
    items = {item.name: item.bytes for item in memory.estimate(given, read(), "cuda")}
    assert time.process_time() - start < 5  # 0.3 s
    matrices = read().matrix_parameters
    assert items["codes and scales (w4a16)"] == matrices // 2 + matrices // 128 * 2
    assert items["unquantized parameters (bfloat16)"] == 2 * (30_532_122_624 - matrices)


def test_a_model_of_too_many_linear_layers_is_refused_before_they_are_listed(read):
    start = time.process_time()
    with pytest.raises(ValueError, match=r"make 15,[0-9,]+ Linear layers; the limit is 131,072: lower"):
        read(num_hidden_layers=10_000, num_experts=512)
    assert time.process_time() - start < 5  # 0.6 s
    found = read(num_hidden_layers=7, decoder_sparse_step=2, mlp_only_layers=[3])
    assert found.linear_count == len(found.linears())


def fused(architecture: Architecture, **sections) -> counted.FusedPass:
    found = counted.fused_pass(config(**sections), architecture, "cuda", 100)
    assert found is not None
    return found


def test_a_layer_of_experts_keeps_the_rows_of_each(read):
    stream, norm, qkv, out, lse = 2 * 2048, 4, 2 * 40 * 128, 2 * 4096, 4 * 32
    gate_up, given, routed = 8 * 2 * 2 * 768, 8 * stream, 4 * 128 + 8 * (4 + 4 + 4 + 4)
    layer = 2 * (stream + norm) + qkv + out + lse + gate_up + given + routed
    kept = {mode: fused(read(), train={"recompute": mode}).kept for mode in ("elementwise", "mlp", "products", "layer")}
    assert kept == {
        "elementwise": layer,
        "mlp": layer - gate_up - given,
        "products": stream + out + lse + routed,
        "layer": stream + routed,
    }
