"""Values of config.json: the policy's log-probs are those of transformers, or the value is refused by name."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_models import hf_logprobs, logprobs, make_policy, tokens
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from qarl.checks.check import check_model
from qarl.config import ModelConfig
from qarl.config.model_fields import IMPLEMENTED
from qarl.config.model_schema import FAMILIES
from qarl.errors import UserError
from qarl.utils.expert_names import EXPERT_NAMES

EQUAL = 2e-5  # float32 through two layers with logits of some 30 nats; another window differs by more than 0.1
WINDOWS: dict[str, list[dict[str, Any]]] = {
    "llama": [{"sliding_window": 16}],
    "mistral": [{"sliding_window": 16}, {"sliding_window": None}],
    "mixtral": [{"sliding_window": 16}, {"sliding_window": None}, {}],
    "qwen2": [
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ],
    "qwen3": [
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ],
    "qwen2_moe": [
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]},
        {"use_sliding_window": False, "sliding_window": 16},
    ],
    "qwen3_moe": [{"use_sliding_window": True, "sliding_window": 16}],
    "olmoe": [{"sliding_window": 16}],
}
# What a family may refuse stands alone; of a change of several keys, every one must be accepted.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0}, "num_key_value_heads": 1},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 3000.0, "num_hidden_layers": 3},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
    {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32, "rope_theta": 500.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
]
CHANGES: list[dict[str, Any]] = [
    {"num_attention_heads": 8, "tie_word_embeddings": True, "rms_norm_eps": 0.3, "num_key_value_heads": 1},
    {"num_key_value_heads": 4, "num_hidden_layers": 3, "tie_word_embeddings": False, "rope_theta": 500.0},
    {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96, "vocab_size": 300}
    | {"pad_token_id": None, "max_position_embeddings": 256},
    {"head_dim": 8},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"hidden_act": "gelu"},
]
OF_EXPERTS: list[dict[str, Any]] = [
    {"num_experts_per_tok": 3, "norm_topk_prob": False, "moe_intermediate_size": 32},
    {"num_experts_per_tok": 1, "norm_topk_prob": True, "shared_expert_intermediate_size": 32},
    {"decoder_sparse_step": 2},
    {"mlp_only_layers": [1]},
    {"num_local_experts": 6},
    {"num_experts": 6},
    {"router_aux_loss_coef": 0.5},
]


def changes(family: str) -> Iterator[dict[str, Any]]:
    mixed = family in EXPERT_NAMES
    alias = "num_local_experts" if family == "mixtral" else "num_experts"
    ropes = ROPES if family == "llama" else ROPES[1:2]
    for change in [*WINDOWS[family], *ropes, *CHANGES, *(OF_EXPERTS if mixed else [])]:
        if mixed and {"num_experts", "num_local_experts"} & change.keys():  # one of the two names at a time
            change = {alias: next(iter(change.values()))}
        yield change


def difference(directory: Path) -> float:
    """The largest difference in nats over 60 tokens between the policy's log-probs and those of transformers."""
    prompt, response = [tokens(20, 1)], [tokens(40, 2)]
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        found, expected = logprobs(make_policy(directory), prompt, response), hf_logprobs(reference, prompt, response)
    return float((found - expected).abs().max())


def saved(directory: Path, family: str, change: dict[str, Any]) -> Path:
    """A tiny model with the change in its config.json exactly as given, not as transformers writes it."""
    try:
        save_tiny_model(directory, family, **copy.deepcopy(change))
    except (TypeError, KeyError):  # transformers makes no such model: qarl must refuse it before
        save_tiny_model(directory, family)
    file = directory / "config.json"
    written = json.loads(file.read_text())
    if {"rope_scaling", "rope_theta"} & change.keys():
        del written["rope_parameters"]
    file.write_text(json.dumps(written | change))
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_gives_the_log_probs_of_transformers_or_is_refused_by_name(tmp_path, family: str) -> None:
    wrong, changed, refusals = {}, set(), 0
    for number, change in enumerate(changes(family)):
        directory = saved(tmp_path / str(number), family, change)
        changed |= change.keys()
        try:
            check_model(ModelConfig(path=str(directory)))
        except UserError as error:
            assert any(key in str(error) for key in change), str(error)
            refusals += 1
            continue
        if (found := difference(directory)) > EQUAL:
            wrong[json.dumps(change)] = found
    assert wrong == {}
    assert refusals <= 6
    aliases = {"model_type", "num_experts", "num_local_experts", "rope_scaling", "rope_parameters"}
    assert IMPLEMENTED[family] - changed <= aliases | {"original_max_position_embeddings"}  # every key has a case
