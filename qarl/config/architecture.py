"""The shape of a model from its config.json or GGUF header: layers, sizes and parameter counts, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qarl.config.gguf_header import read_gguf_header

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class UnknownFamily(ValueError):
    """A model whose layers this module cannot list, and that transformers may still run."""


class LinearShape(NamedTuple):
    """A Linear layer: its Hugging Face module name and its weight [out_features, in_features]."""

    name: str
    out_features: int
    in_features: int


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama layout (fused nothing, gated MLP). Sizes in elements."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int | None
    tied_embeddings: bool
    attention_bias: bool = False  # q, k, v and o
    mlp_bias: bool = False

    def linears(self) -> list[LinearShape]:
        """Every Linear but the output layer, in the order of the forward."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = [
            ("self_attn.q_proj", heads, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, heads),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ]
        return [LinearShape(f"model.layers.{i}.{name}", n, k) for i in range(self.num_layers) for name, n, k in layer]

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, and of the output layer where it has its own weight."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def vector_parameters(self) -> int:
        """Norm weights and biases."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = 2 * self.hidden_size
        if self.family == "qwen3":
            layer += 2 * self.head_dim  # q and k norms
        if self.family == "qwen2":
            layer += heads + 2 * kv
        elif self.attention_bias:
            layer += heads + 2 * kv + self.hidden_size
        if self.mlp_bias:
            layer += 2 * self.intermediate_size + self.hidden_size
        return self.num_layers * layer + self.hidden_size

    @property
    def matrix_parameters(self) -> int:
        """Of the Linear layers but the output layer: what muon updates and a scheme quantizes."""
        return sum(n * k for _, n, k in self.linears())

    @property
    def parameters(self) -> int:
        """All of them, tied weights once."""
        return self.embedding_parameters + self.vector_parameters + self.matrix_parameters


def read_config_json(path: Path) -> Architecture:
    """Architecture of a Hugging Face config.json.

    Raises ValueError (one line, without the path): no JSON, a missing key; UnknownFamily.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError("is not a JSON object")
    family = _family(config.get("model_type"))
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    return Architecture(
        family=family,
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        # transformers' own default; Qwen3 gives head_dim always, 128
        head_dim=config.get("head_dim") or (128 if family == "qwen3" else hidden // heads),
        vocab_size=_size(config, "vocab_size"),
        context_length=config.get("max_position_embeddings"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def read_gguf(path: Path) -> Architecture:
    """Architecture of a GGUF file. Raises ValueError as `read_config_json` does."""
    header = read_gguf_header(path)
    metadata = header.metadata
    family = _family(metadata.get("general.architecture"))
    hidden, heads = _size(metadata, f"{family}.embedding_length"), _size(metadata, f"{family}.attention.head_count")
    return Architecture(
        family=family,
        hidden_size=hidden,
        intermediate_size=_size(metadata, f"{family}.feed_forward_length"),
        num_layers=_size(metadata, f"{family}.block_count"),
        num_heads=heads,
        num_kv_heads=metadata.get(f"{family}.attention.head_count_kv") or heads,
        head_dim=metadata.get(f"{family}.attention.key_length") or hidden // heads,
        vocab_size=metadata.get(f"{family}.vocab_size") or _size(metadata, "tokenizer.ggml.tokens"),
        context_length=metadata.get(f"{family}.context_length"),
        tied_embeddings="output.weight" not in header.tensors,
    )


def _family(name: Any) -> str:
    if name not in FAMILIES:
        raise UnknownFamily(
            f"is of the family {name}, whose layers are not known here; known are {', '.join(FAMILIES)}"
        )
    return name


def _size(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"has {key} = {value!r}; must be a positive integer")
    return value
