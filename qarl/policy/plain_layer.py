"""A decoder layer in plain torch, on autograd: its meaning, a CPU's path, and what `fused_layer` is compared with.

Rounds to the compute dtype where Hugging Face's layer does: after each product, norm, rotation and addition.
"""

from __future__ import annotations

import torch
from qarl_kernels.pointwise import round_e4m3
from torch import Tensor

from qarl.policy.attention import PlainAttention
from qarl.policy.layer import LayerModules
from qarl.policy.mixture import mixture
from qarl.policy.routes import Routes
from qarl.policy.trace import Note


def plain_layer(
    modules: LayerModules,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    attention: PlainAttention,
    note: Note,
    routes: Routes,
    kv_fp8: bool,
) -> Tensor:
    """The layer's output (T, H).

    hidden: (T, H) of the compute dtype; cos, sin: (T, D), of each row's position. kv_fp8: see `View`.
    """
    layer, index = modules.module, modules.index
    attend = layer.self_attn
    note(index, "stream", hidden)
    normed = layer.input_layernorm(hidden)
    note(index, "input_norm", normed)
    q, k, v = attend.q_proj(normed), attend.k_proj(normed), attend.v_proj(normed)
    note(index, "qkv", q, k, v)
    if modules.whole_norms:
        q, k = attend.q_norm(q), attend.k_norm(k)
    q, k, v = (x.unflatten(1, (-1, modules.head_dim)) for x in (q, k, v))
    if modules.q_norm is not None and not modules.whole_norms:
        q, k = attend.q_norm(q), attend.k_norm(k)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    if kv_fp8:
        k, v = round_e4m3(k), round_e4m3(v)
    note(index, "rotary", q, k)
    out = attention(q, k, v, index, modules.scale, modules.window)
    note(index, "attention", out)
    product = attend.o_proj(out.flatten(1))
    note(index, "o", product)
    hidden = hidden + product
    note(index, "mlp_stream", hidden)
    normed = layer.post_attention_layernorm(hidden)
    note(index, "mlp_norm", normed)
    if modules.experts is not None:
        return hidden + mixture(modules, modules.experts, normed, routes, note)
    mlp = layer.mlp
    gate, up = mlp.gate_proj(normed), mlp.up_proj(normed)
    note(index, "gate_up", gate, up)
    product = mlp.act_fn(gate) * up
    note(index, "activation", product)
    product = mlp.down_proj(product)
    note(index, "down", product)
    return hidden + product


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (T, H, D) by cos and sin (T, D), in x's dtype."""
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]
