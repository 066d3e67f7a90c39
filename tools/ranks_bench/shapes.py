"""Names and shapes of the masters of models. Imports nothing, so that ranks start at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model_sizes import QWEN3, SIZES, Sizes

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Shape(Sizes):
    """A model as Qwen3 is built. group_size: of int4 weights. experts: of a layer, 0: it has an MLP; inner: of
    each of them. per_token: experts that a token goes through."""

    vocabulary: int = 151_936
    group_size: int = 128
    experts: int = 0
    per_token: int = 0


def _shape(name: str, **more: Any) -> Shape:
    return Shape(**vars(SIZES[name]), **more)


SHAPES = {
    "tiny": _shape("tiny", vocabulary=512, group_size=32),
    "tiny-moe": Shape(128, 64, 4, 4, 2, 32, True, 512, 32, experts=128, per_token=8),
    **{name: _shape(name) for name in QWEN3},
    "qwen3-30b-a3b": _shape("qwen3-30b-a3b", experts=128, per_token=8),
}


def layer_shapes(shape: Shape, layer: int) -> Shapes:
    query, key, hidden, inner = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden, shape.inner
    norms = {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}
    norms |= {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    found: Shapes = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
    } | {f"{name}.weight": (size,) for name, size in norms.items()}
    blocks = [f"mlp.experts.{index}" for index in range(shape.experts)] or ["mlp"]
    for block in blocks:
        found |= {f"{block}.{leaf}_proj.weight": (inner, hidden) for leaf in ("gate", "up")}
        found[f"{block}.down_proj.weight"] = (hidden, inner)
    if shape.experts:
        found["mlp.gate.weight"] = (shape.experts, hidden)
    return {f"model.layers.{layer}.{name}": size for name, size in found.items()}


def head_shapes(shape: Shape) -> Shapes:
    """What is in no layer."""
    table = shape.vocabulary, shape.hidden
    head: Shapes = {} if shape.tied else {"lm_head.weight": table}
    return {"model.embed_tokens.weight": table, "model.norm.weight": (shape.hidden,)} | head


def model_shapes(shape: Shape) -> Shapes:
    found = head_shapes(shape)
    for layer in range(shape.layers):
        found |= layer_shapes(shape, layer)
    return found
