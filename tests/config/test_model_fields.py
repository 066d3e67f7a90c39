"""Keys of config.json: each key that transformers or vLLM reads for a supported family is classified."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plain_settings import MODEL

from qarl.checks.check import check_model
from qarl.config import ModelConfig
from qarl.config.architecture import read_config_json
from qarl.config.model_fields import IMPLEMENTED, refused, refused_by_vllm
from qarl.config.model_schema import FAMILIES, ConfigJson
from qarl.errors import UserError
from qarl.utils.expert_names import EXPERT_NAMES

# Keys that do not change a forward: training only, token ids, the layout of the outputs, bookkeeping.
# pretraining_tp: transformers 4 split matrix products into this many parts; 5 does not read it.
# num_labels and the like: for classification heads. attention_dropout: training only; a policy's forward drops nothing.
# mtp_*, mlp_layer_types, number_of_conv_states and the like: parts that only other families have.
IRRELEVANT = set(
    re.findall(
        r"\w+",
        "ada_rms_norm_t_cond_dim architectures attention_dropout attn_implementation auto_map bos_token_id "
        "classifier_dropout dtype eos_token_id first_k_dense_replace gradient_checkpointing hidden_dropout "
        "id2label init_std initializer_factor initializer_range label2id mlp_layer_types mtp_layer_types "
        "mtp_mlp_layer_types mtp_per_layer_config name_or_path num_labels num_mtp_layers number_of_conv_states "
        "pretraining_tp problem_type quantization_config router_aux_loss_coef sep_token_id target_layer_count "
        "tie_last_hidden_states token_classification_bias torch_dtype transformers_version use_cache",
    )
)
# Methods and class attributes of PreTrainedConfig.
RESERVED = set(
    re.findall(
        r"\w+",
        "allow_global_per_layer_attribute_access attribute_map base_config_key base_model_ep_plan "
        "base_model_fsdp_plan base_model_pp_plan base_model_tp_plan convert_rope_params_to_dict default_rope_type "
        "default_theta dict_dtype_to_str from_dict from_json_file from_pretrained get_config_dict get_mtp_config "
        "get_text_config has_no_defaults_at_init ignore_keys_at_rope_validation is_custom_code is_heterogeneous "
        "is_remote_code keys_to_ignore_at_inference nested_rope_parameter_keys per_layer_attributes push_to_hub "
        "register_for_auto_class save_pretrained serialize_explicit_per_layer_config standardize_rope_params "
        "sub_configs to_dict to_diff_dict to_json_file to_json_string update update_from_string validate "
        "validate_architecture validate_layer_type validate_output_attentions validate_rope validate_token_ids",
    )
)


# Modules beside the family's modeling_*.py that build masks, rotary embeddings, caches, experts and outputs.
SHARED = (
    *["masking_utils", "modeling_rope_utils", "modeling_utils", "cache_utils", "configuration_utils"],
    *["integrations/moe", "integrations/sdpa_attention", "utils/generic", "utils/output_capturing"],
)


def package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(found.origin).parent


def is_config(node: ast.expr) -> bool:
    """`config`, `self.config`, `layer_config` or the like: a model's configuration."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in ("config", "text_config", "hf_config", "layer_config", "effective_config", "model_config")


def reads(file: Path) -> Iterator[str]:
    """The attributes of a configuration that a module reads, also by getattr and hasattr with a literal name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and is_config(node.value):
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            owner, key = node.args[:2]
            if is_config(owner) and isinstance(key, ast.Constant):
                yield key.value


# Attributes of the classes, not of a file.
INTERNAL = {"__class__", "hf_config", "hf_text_config"}


def forward_fields(family: str) -> frozenset[str]:
    """Return the keys of config.json that can change the forward of the family."""
    return IMPLEMENTED[family] | refused(family).keys() | refused_by_vllm(family).keys() | {"layer_types"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_knows_every_key_that_transformers_and_vllm_read(family):
    root, known = package("transformers"), forward_fields(family) | IRRELEVANT | RESERVED | INTERNAL
    files = [root / f"models/{family}/{kind}_{family}.py" for kind in ("modeling", "configuration")]
    files += [root / f"{name}.py" for name in SHARED]
    found = {file.name: {key for key in reads(file) if key[0] != "_"} for file in files}
    assert {"is_causal", "sliding_window", "num_hidden_layers"} <= set().union(*found.values())  # the search works
    assert {name: keys - known for name, keys in found.items() if keys - known} == {}
    if importlib.util.find_spec("vllm") is not None:
        assert set(reads(package("vllm") / f"model_executor/models/{family}.py")) - known == set()


def test_the_table_knows_the_attributes_of_the_configuration_classes():
    from transformers import AutoConfig

    for family in FAMILIES:
        names = {name for name in dir(AutoConfig.for_model(family)) if name[0] != "_"}
        assert names - forward_fields(family) - IRRELEVANT - RESERVED == set(), family


ANY: tuple[Any, ...] = (None, True, False, 0, 1, 0.5, "x", [], {"a": 1})


def is_off(value: Any, accepted: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted)


@pytest.fixture
def write(tmp_path):
    def write(family: str, **changes: Any) -> Path:
        plain = MODEL | {"model_type": family, "num_key_value_heads": 2, "vocab_size": 259}
        if family in EXPERT_NAMES:
            plain |= {"num_local_experts" if family == "mixtral" else "num_experts": 4, "num_experts_per_tok": 2}
        (tmp_path / "config.json").write_text(json.dumps(plain | changes))
        return tmp_path

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_not_implemented_is_refused_by_name_unless_it_is_off(write, family):
    accepted = 0
    for turn, (key, off) in enumerate(refused(family).items()):
        for value in (v for i, v in enumerate(ANY) if is_off(v, off) or (i + turn) % 3 == 0):
            model = ModelConfig(path=str(write(family, **{key: value})))
            if is_off(value, off):
                check_model(model)
                accepted += 1
                continue
            with pytest.raises(UserError, match=rf"config.json is not valid: {key} = .*: must be "):
                check_model(model)
    assert accepted > len(refused(family)) / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_only_vllm_follows_are_refused_for_vllm_alone(write, family):
    for key, off in refused_by_vllm(family).items():
        for value in ANY:
            if key in ConfigJson.model_fields and (type(value) is not int or value == 0):
                continue  # refused for every sampler, by its type or range
            found = read_config_json(write(family, **{key: value}) / "config.json").vllm_fault
            assert (found == "") if is_off(value, off) else (key in found)


@pytest.mark.parametrize("family", EXPERT_NAMES)
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_more_experts_a_token_than_there_are_is_refused_also_by_default(write, family, key):
    defaults = {"mixtral": (8, 2), "qwen2_moe": (60, 4), "qwen3_moe": (128, 8), "olmoe": (64, 8)}
    experts, default = defaults[family]
    path = write(family) / "config.json"
    plain = {name: value for name, value in json.loads(path.read_text()).items() if "expert" not in name}
    for count in range(1, 12):
        there = experts if (family, key) == ("qwen2_moe", "num_local_experts") else count  # qwen2_moe has no such key
        for slots in ({}, {"num_experts_per_tok": 1}, {"num_experts_per_tok": 9}):
            path.write_text(json.dumps(plain | {key: count} | slots))
            if (wanted := slots.get("num_experts_per_tok", default)) > there:
                with pytest.raises(ValueError, match=r"num_experts_per_tok.* is above its"):
                    read_config_json(path)
            else:
                found = read_config_json(path).mixture
                assert found is not None and (found.experts, found.per_token) == (there, wanted)
