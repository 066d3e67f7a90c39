"""The keys of config.json that change a forward, per family: implemented, or refused unless they are off. No torch.

Every key that transformers reads for a supported family is in one of three lists: qarl implements it as transformers
does (`IMPLEMENTED`), qarl accepts only the values that leave the forward unchanged (`refused`), or qarl ignores it
because it does not change a forward. The third list is in `tests/config/test_model_fields.py`, which reads the source
of the installed transformers and fails for a key in none of the lists.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qarl.inputs.json import short_json


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Implemented for every family. pad_token_id: no gradient from look-ups of that token.
_COMMON = _keys(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim max_position_embeddings rms_norm_eps tie_word_embeddings rope_parameters rope_scaling "
    "rope_theta original_max_position_embeddings pad_token_id model_type hidden_act"
)
_WINDOWS = "use_sliding_window sliding_window"
_EXPERTS = "num_experts num_experts_per_tok norm_topk_prob"
_SPARSE = f"{_EXPERTS} moe_intermediate_size decoder_sparse_step mlp_only_layers"
IMPLEMENTED = {
    family: _COMMON | _keys(keys)
    for family, keys in {
        "llama": "attention_bias mlp_bias",
        "mistral": "sliding_window",
        "qwen2": f"{_WINDOWS} max_window_layers layer_types",
        "qwen3": f"{_WINDOWS} max_window_layers layer_types attention_bias",
        "mixtral": "sliding_window num_local_experts num_experts num_experts_per_tok",
        "qwen2_moe": f"{_WINDOWS} max_window_layers layer_types {_SPARSE} shared_expert_intermediate_size",
        "qwen3_moe": f"{_WINDOWS} {_SPARSE} num_local_experts attention_bias",
        "olmoe": f"{_EXPERTS} num_local_experts attention_bias",
    }.items()
}

# Accepted values; a missing key is accepted too. Keys that transformers reads come first, then keys of other families
# whose values a user would expect to have an effect.
_OFF: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),  # null means no causal mask, as false does
    "clip_qkv": (None,),
    "router_jitter_noise": (None, 0),
    "output_router_logits": (None, False),
    "partial_rotary_factor": (None, 1),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_chunk_size": (None,),
    "num_kv_shared_layers": (None, 0),
    "is_encoder_decoder": (None, False),
    "chunk_size_feed_forward": (None, 0),
    "return_dict": (None, True),
    "use_return_dict": (None, True),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "transformers_weights": (None,),
    "fusion_config": (None,),
    "per_layer_config": (None,),
    "experts_implementation": (None,),
    "distributed_config": (None,),
    "text_config": (None,),
    "text_encoder": (None,),
    "decoder": (None,),
    "generator": (None,),
    "vision_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logits_soft_cap": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "logits_mup_width_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "embedding_multiplier": (None, 1),
    "rotary_pct": (None, 1),
    "rotary_emb_fraction": (None, 1),
    "no_rope_layers": (None, []),
    "use_mrope": (None, False),
    "use_qk_norm": (None, False),
    "compression_config": (None,),
}
_NORMED = {"use_qk_norm": (None, True)}
_OFF_OF_FAMILY: dict[str, dict[str, tuple[Any, ...]]] = {
    "mistral": {"use_sliding_window": (True,)},  # transformers reads sliding_window alone
    "mixtral": {"use_sliding_window": (True,)},
    "qwen2_moe": {"qkv_bias": (None, True)},  # vLLM always has the biases
    "qwen3": _NORMED,
    "qwen3_moe": _NORMED,
    "olmoe": _NORMED,
}
# Ignored by transformers and read by vLLM's model of the family: refused for a vLLM sampler alone.
_NO_WINDOW = {"sliding_window": (None, 0)}
_VLLM_OFF: dict[str, tuple[Any, ...]] = {
    "bias": (None, False),
    "qkv_bias": (None, False),
    "qk_norm": (None, False),
    "dual_chunk_attention_config": (None,),
    "llama_4_scaling": (None,),
    "ada_rms_norm_t_cond": (None, False),
}
_VLLM_OFF_OF_FAMILY: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": _NO_WINDOW,
    "olmoe": _NO_WINDOW,
    "qwen2": {"qkv_bias": (None, True)},
    "qwen3_moe": {"shared_expert_intermediate_size": (None,)},
}

ACTIVATIONS = ("silu", "swish")
# Types of rotary embedding whose frequencies do not depend on the length of the sequence, with the keys they need.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_DEFAULT_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096, "qwen2_moe": 4096, "qwen3_moe": 4096}


def refused(family: str) -> dict[str, tuple[Any, ...]]:
    """The keys that are refused for the family, with the values that are accepted nevertheless."""
    off = _OFF | _OFF_OF_FAMILY.get(family, {})
    return {key: values for key, values in off.items() if key not in IMPLEMENTED[family]}


def refused_by_vllm(family: str) -> dict[str, tuple[Any, ...]]:
    """The keys that only vLLM's model of the family reads, with the values at which it computes what qarl does."""
    off, known = _VLLM_OFF | _VLLM_OFF_OF_FAMILY.get(family, {}), IMPLEMENTED[family] | refused(family).keys()
    return {key: values for key, values in off.items() if key not in known}


def check_refused(family: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError, one line with the key and the accepted values, for a key that qarl does not implement.

    config: the content of config.json, of any types.
    """
    for key, accepted in refused(family).items():
        if fault := _fault(config, key, accepted):
            raise ValueError(f"is not valid: {fault}: qarl does not implement it for {family}")


def check_implemented(family: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError, one line with the key, if an implemented key has a value for which there is no forward.

    config: the content of config.json, valid as `qarl.config.model_schema.ConfigJson`.
    """
    _check_windows(family, config)
    if (activation := config.get("hidden_act", "silu")) not in ACTIVATIONS:
        raise ValueError(f"is not valid: hidden_act = {short_json(activation)}: must be {' or '.join(ACTIVATIONS)}")
    _check_rope(config)
    _check_head_dim(family, config)


def vllm_fault(family: str, config: Mapping[str, Any], windows: Sequence[int | None]) -> str:
    """Why vLLM's model of the family would compute something different from qarl's; empty if it would not.

    Args:
        family: `model_type` of the configuration.
        config: The content of config.json.
        windows: Result of `layer_windows`.
    """
    if len(set(windows)) > 1:
        return "some of its layers have a sliding window and some have none, which vLLM rejects"
    for key, accepted in refused_by_vllm(family).items():
        if fault := _fault(config, key, accepted):
            return f"config.json: {fault}: vLLM follows it, and transformers and qarl do not"
    kinds = config.get("layer_types") or ()
    own = "full_attention" if windows[0] is None else "sliding_attention"
    if "layer_types" not in IMPLEMENTED[family] and set(kinds) - {own}:
        return f"config.json: layer_types: vLLM follows it; all layers of this {family} have {own}, so remove the key"
    return ""


def layer_windows(family: str, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The sliding window of each layer in tokens, None for full attention, as transformers 5.19 gives it.

    Args:
        family: `model_type` of the configuration.
        config: config.json, or the attributes of a transformers configuration. Reads num_hidden_layers, and if given
            sliding_window, use_sliding_window, max_window_layers and layer_types.
    """
    layers, window = config["num_hidden_layers"], config.get("sliding_window", _DEFAULT_WINDOW.get(family))
    used = bool(config.get("use_sliding_window", False))
    if family in ("mistral", "mixtral"):
        return (window,) * layers
    if family == "qwen3_moe":
        return (window if used else None,) * layers
    if family not in ("qwen2", "qwen3", "qwen2_moe"):
        return (None,) * layers
    first, kinds = config.get("max_window_layers", 28), config.get("layer_types")
    if kinds is not None:
        slides = [kind == "sliding_attention" for kind in kinds]
    elif family == "qwen2_moe":
        slides = [used and layer % 2 == 0 and layer < first for layer in range(layers)]
    else:
        slides = [used and layer >= first for layer in range(layers)]
    return tuple(window if slide else None for slide in slides)


def _check_windows(family: str, config: Mapping[str, Any]) -> None:
    """Refuse windows for which transformers builds no mask: of 0 tokens, or in layers of a model that uses none."""
    used, explicit = bool(config.get("use_sliding_window")), "sliding_attention" in (config.get("layer_types") or ())
    per_layer = "layer_types" in IMPLEMENTED[family]
    if 0 in layer_windows(family, config) or (per_layer and explicit and not used):
        raise ValueError("is not valid: layers have a sliding window, and it is 0 or use_sliding_window is false")
    null = "sliding_window" in config and config["sliding_window"] is None
    if per_layer and null and used and (explicit or family == "qwen2_moe"):
        raise ValueError("is not valid: use_sliding_window is true, and sliding_window is null; give its tokens")


def _rope_key(config: Mapping[str, Any]) -> str | None:
    """The key from which transformers reads the rotary embedding's parameters; None for the defaults."""
    return next((key for key in ("rope_scaling", "rope_parameters") if config.get(key)), None)


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _check_rope(config: Mapping[str, Any]) -> None:
    key = _rope_key(config)
    if key is None:
        return
    rope = config[key]
    kind = _rope_type(rope)
    if kind not in ROPE_TYPES:
        # Frequencies that depend on the sequence length rule out a batch-invariant forward.
        text = "changes with the sequence length, or is not known"
        raise ValueError(f"is not valid: {key}.rope_type = {short_json(kind)}: {text}; use {', '.join(ROPE_TYPES)}")
    for part in ROPE_TYPES[kind]:
        if rope.get(part) is None:
            raise ValueError(f"is not valid: {key}.{part} is missing, which rope_type {kind} needs")
    for part in ("full_attention", "sliding_attention"):
        if part in rope:
            raise ValueError(f"is not valid: {key}.{part}: all layers must have the same rotary embedding")


def _check_head_dim(family: str, config: Mapping[str, Any]) -> None:
    """Reject head sizes for which transformers 5.19 cannot build or run a model of the family."""
    size, equal = config.get("head_dim"), config["hidden_size"] / config["num_attention_heads"]
    if "head_dim" in config and size is None and family not in ("llama", "mistral", "mixtral"):
        raise ValueError("is not valid: head_dim is null; give its value, or remove the key")
    if family == "llama" and equal % 1:
        raise ValueError("is not valid: num_attention_heads does not divide hidden_size, which Llama requires")
    if family == "olmoe" and size not in (None, equal):
        raise ValueError(f"is not valid: head_dim = {size}: OLMoE's norms require hidden_size / num_attention_heads")
    key = _rope_key(config)
    if family == "mixtral" and size is None and key and _rope_type(config[key]) == "yarn":
        raise ValueError(f'is not valid: {key}.rope_type = "yarn": needs head_dim in the configuration of Mixtral')


def _fault(config: Mapping[str, Any], key: str, accepted: tuple[Any, ...]) -> str | None:
    """`key = value: must be ...` if the key's value is not accepted. 1 equals 1.0, but not true."""
    if key not in config:
        return None
    value = config[key]
    if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
        return None
    return f"{key} = {short_json(value)}: must be {' or '.join(short_json(one) for one in accepted)}, or missing"
