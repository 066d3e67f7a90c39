"""Schemas of config.json, generation_config.json and GGUF metadata: types and ranges.

Upper bounds are far above any real model, and low enough that products of sizes neither overflow nor take long to list.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from qarl.inputs.files import Unreadable
from qarl.inputs.schema import Record, checked

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
# Defaults of transformers for a missing key; null means one per head.
DEFAULT_KV_HEADS = {
    "llama": None,
    "mistral": 8,
    "qwen2": 32,
    "qwen3": 32,
    "mixtral": 8,
    "qwen2_moe": 16,
    "qwen3_moe": 4,
    "olmoe": None,
}

Hidden = Annotated[int, Field(ge=1, le=2**20)]
Inner = Annotated[int, Field(ge=1, le=2**22)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Heads = Annotated[int, Field(ge=1, le=2**14)]
Whole = Annotated[float, Field(ge=1, le=1)]
Experts = Annotated[int, Field(ge=1, le=512)]
Slots = Annotated[int, Field(ge=1, le=16)]
HeadDim = Annotated[int, Field(ge=2, le=2**14, multiple_of=2)]
Vocabulary = Annotated[int, Field(ge=1, le=2**26)]
Context = Annotated[int, Field(ge=1, le=2**24)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
Theta = Annotated[float, Field(ge=1, le=1e15)]
Factor = Annotated[float, Field(gt=0, le=1e6)]
TokenId = Annotated[int, Field(ge=0, lt=2**26)]


def _token_ids(value: Any) -> Any:
    ids = value if isinstance(value, list) else [value]
    if len(ids) > 4096 or any(type(token) is not int or not 0 <= token < 2**26 for token in ids):
        raise ValueError("must be a token's id, or a list of them")
    return value


TokenIds = Annotated[Any, AfterValidator(_token_ids)]  # the errors of a union type would name its branches
Attention = Literal["full_attention", "sliding_attention"]
Dtype = Literal[
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "torch.float64",
    "torch.float32",
    "torch.float16",
    "torch.bfloat16",
    "auto",
]

T = TypeVar("T", bound=Record)


class Rope(Record):
    """`rope_parameters`, or `rope_scaling` of older files. `model_fields` checks which of them a type needs."""

    rope_type: Annotated[str, Field(max_length=40)] | None = None
    type: Annotated[str, Field(max_length=40)] | None = None
    rope_theta: Theta | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    attention_factor: Factor | None = None
    mscale: Annotated[float, Field(ge=0, le=1e6)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, le=1e6)] | None = None
    truncate: bool | None = None
    original_max_position_embeddings: Context | None = None
    partial_rotary_factor: Whole | None = None  # others rotate only a part of each head
    short_factor: Annotated[list[Factor], Field(max_length=2**14)] | None = None
    long_factor: Annotated[list[Factor], Field(max_length=2**14)] | None = None


class StopTokens(Record):
    """Token ids in both config.json and generation_config.json. Old files have pad_token_id -1 for none."""

    eos_token_id: TokenIds | None = None
    bos_token_id: TokenId | None = None
    pad_token_id: Annotated[int, Field(ge=-1, lt=2**26)] | None = None


class ConfigJson(StopTokens):
    """config.json of a model of one of `FAMILIES`."""

    model_type: Annotated[str, Field(max_length=100)] | None = None
    hidden_size: Hidden
    intermediate_size: Inner
    num_hidden_layers: Layers
    num_attention_heads: Heads
    vocab_size: Vocabulary
    num_key_value_heads: Heads | None = None  # missing: see DEFAULT_KV_HEADS
    head_dim: HeadDim | None = None
    max_position_embeddings: Context | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Annotated[str, Field(max_length=40)] = "silu"
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Theta | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    sliding_window: Annotated[int, Field(ge=0, le=2**31)] | None = None  # 0: none, in qwen2_moe files
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Field(ge=0, le=2**31)] = 28  # transformers' own default
    layer_types: Annotated[list[Attention], Field(max_length=10_000)] | None = None
    initializer_range: Annotated[float, Field(ge=0, le=1)] = 0.02
    attention_dropout: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    pretraining_tp: int | None = 1
    use_cache: bool = True
    dtype: Dtype | None = None
    torch_dtype: Dtype | None = None
    architectures: Annotated[list[str], Field(max_length=100)] | None = None
    auto_map: dict[str, str | list[str | None]] | None = None
    quantization_config: dict[str, Any] | None = None
    # Mixture of experts; defaults: qarl.config.mixture.
    num_experts: Experts | None = None
    num_local_experts: Experts | None = None
    num_experts_per_tok: Slots | None = None
    moe_intermediate_size: Inner | None = None
    shared_expert_intermediate_size: Inner | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: Annotated[int, Field(ge=1, le=10_000)] = 1
    mlp_only_layers: Annotated[list[Annotated[int, Field(ge=0, lt=10_000)]], Field(max_length=10_000)] | None = None
    # Keys that must be off: see qarl.config.model_fields.
    num_labels: Annotated[int, Field(ge=0, le=10_000)] | None = None


class GGUFModel(Record):
    """The metadata of a GGUF file under its architecture's prefix."""

    hidden_size: Hidden = Field(alias="embedding_length")
    intermediate_size: Inner = Field(alias="feed_forward_length")
    num_hidden_layers: Layers = Field(alias="block_count")
    num_attention_heads: Heads = Field(alias="attention.head_count")
    vocab_size: Vocabulary
    num_key_value_heads: Heads | None = Field(None, alias="attention.head_count_kv")
    head_dim: HeadDim | None = Field(None, alias="attention.key_length")
    max_position_embeddings: Context | None = Field(None, alias="context_length")
    rms_norm_eps: Epsilon | None = Field(None, alias="attention.layer_norm_rms_epsilon")
    rope_theta: Theta | None = Field(None, alias="rope.freq_base")


def valid(model: type[T], values: Mapping[str, Any]) -> T:
    """Validate `values`. Raises ValueError: one line with the invalid key, without the file's name."""
    try:
        found = checked(model, values, "")
    except Unreadable as error:
        raise ValueError(f"is not valid: {error.reason}") from None
    if isinstance(found, ConfigJson | GGUFModel):
        _check_together(found)
    return found


def _check_together(found: ConfigJson | GGUFModel) -> None:
    heads, kv_heads = found.num_attention_heads, found.num_key_value_heads
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(f"is not valid: its {kv_heads} key-value heads do not divide its {heads} attention heads")
    if found.head_dim is None and found.hidden_size % heads:
        raise ValueError(f"is not valid: its {heads} attention heads do not divide its hidden size {found.hidden_size}")
    if found.head_dim is None and found.hidden_size // heads % 2:
        raise ValueError(
            f"is not valid: its heads of {found.hidden_size // heads} features are odd; rotary embeddings rotate pairs"
        )
    if isinstance(found, ConfigJson):
        if None not in (one := (found.num_experts, found.num_local_experts)) and one[0] != one[1]:
            raise ValueError(f"is not valid: num_experts {one[0]} and num_local_experts {one[1]} differ; remove one")
        kinds = found.layer_types
        if kinds is not None and len(kinds) != found.num_hidden_layers:
            raise ValueError(f"is not valid: layer_types names {len(kinds)} layers of {found.num_hidden_layers}")
        for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
            value = getattr(found, key)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and token >= found.vocab_size:
                    raise ValueError(f"is not valid: {key} {token} is not below its vocab_size {found.vocab_size}")
