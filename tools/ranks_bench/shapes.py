"""Names and shapes of the masters of models as Qwen3 is built."""

from __future__ import annotations

import model_sizes
from model_sizes import Shape

Shapes = dict[str, tuple[int, ...]]
SHAPES = {name: shape for name, shape in model_sizes.SHAPES.items() if shape.family.startswith("qwen3")}


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
