"""Gradients of causal attention over a packed batch, deterministic and without atomics.

Probabilities are recomputed from the saved log-sum-exp. The gradient of queries iterates over the keys of a tile of
query rows. The gradients of keys and values iterate over the query rows that see a tile of keys, for each head that
shares the keys. These rows are one contiguous range, and only its first rows need a mask. Long ranges are split into
work items of at most ITEM_ROWS rows, which write float32 partial sums that a last kernel adds in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_kernels.flash import layout as tables
from qarl_kernels.flash.backward_kernels import key_grad_kernel, key_sum_kernel, query_grad_kernel, stats_kernel
from qarl_kernels.flash.forward import Tile, check
from qarl_kernels.flash.layout import PackedLayout, padded
from qarl_kernels.flash.steps import LOG2E
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import capability_of, launch, supports_tma, tma_descriptor

# By padded head size: tiles for the gradient of queries, and for keys and values. A row's bits depend on the tile, and
# the tile on the head size alone.
TILES = {
    64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    128: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
    256: (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2)),
}
BEFORE_HOPPER = {
    64: (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    256: (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
STATS_ROWS = 32


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: PackedLayout,
    scale: float,
    window: int | None,
    dv: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `attention_forward`, deterministically.

    Args:
        grad_out: (T, H, D) of q's dtype.
        q, k, v, layout, scale, window: Arguments of the forward.
        out, lse: Results of the forward, (T, H, D) and (H, T).
        dv: (T, H_kv, D) of q's dtype, arbitrary row stride; receives the gradient of v.

    Returns:
        The gradients of q (T, H, D) and of k (T, H_kv, D).
    """
    check(q, k, v, scale, window)
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    if grad_out.stride(2) != 1 or grad_out.stride(1) != dim:
        grad_out = grad_out.contiguous()
    dq, dk = (torch.empty(*like.shape, dtype=like.dtype, device=like.device) for like in (q, k))
    if tokens == 0:
        return dq, dk
    # Blocks read past the last row; these values are multiplied by 0 and must be finite.
    padded_tokens = cdiv(tokens + 3 + tables.TILE, 4) * 4
    stats = torch.zeros(4, 2, heads, padded_tokens, dtype=torch.float32, device=q.device)
    sizes = {"D": dim, "D_PAD": padded(dim)}
    launch(
        stats_kernel,
        (heads, cdiv(tokens, STATS_ROWS)),
        num_warps=4,
        grad_out=grad_out,
        out=out,
        lse=lse,
        stats=stats,
        T=tokens,
        T_PAD=padded_tokens,
        stride_g=grad_out.stride(0),
        ROWS=STATS_ROWS,
        **sizes,
    )
    shared = {
        "q": q,
        "k": k,
        "v": v,
        "grad_out": grad_out,
        "stats": stats,
        "scale": scale,
        "scale2": scale * LOG2E,
        "T_PAD": padded_tokens,
        "rep": heads // kv_heads,
        "window": window or 0,
        "stride_q": q.stride(0),
        "stride_k": k.stride(0),
        "stride_v": v.stride(0),
        "stride_g": grad_out.stride(0),
        "TILE": tables.TILE,
        "WINDOW": window is not None,
        **sizes,
    }
    tile, key_tile = (TILES if capability_of(q) >= (9, 0) else BEFORE_HOPPER)[padded(dim)]
    launch(
        query_grad_kernel,
        (heads, layout.queries.shape[0] * (tables.TILE // tile.rows)),
        num_warps=tile.warps,
        num_stages=tile.stages,
        dq=dq,
        tiles=layout.queries,
        stride_dq=dq.stride(0),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.block,
        **shared,
    )
    flat = [t.view(tokens, heads * dim) for t in (q, grad_out)]
    tma = all(map(supports_tma, flat))
    if tma:
        shared["q"], shared["grad_out"] = (tma_descriptor(t, (key_tile.block, padded(dim))) for t in flat)
        shared["stats"] = tma_descriptor(stats.view(-1), (key_tile.block,))
    partial = torch.empty(layout.partials, 2, kv_heads, tables.TILE, dim, dtype=torch.float32, device=q.device)
    launch(
        key_grad_kernel,
        (kv_heads, layout.items.shape[0] * (tables.TILE // key_tile.rows)),
        num_warps=key_tile.warps,
        num_stages=key_tile.stages,
        dk=dk,
        dv=dv,
        partial=partial,
        positions=layout.positions,
        items=layout.items,
        stride_dk=dk.stride(0),
        stride_dv=dv.stride(0),
        BLOCK_M=key_tile.block,
        BLOCK_N=key_tile.rows,
        TMA=tma,
        **shared,
    )
    launch(
        key_sum_kernel,
        (kv_heads, layout.cuts.shape[0] * (tables.TILE // 32)),
        num_warps=4,
        partial=partial,
        dk=dk,
        dv=dv,
        cuts=layout.cuts,
        stride_dk=dk.stride(0),
        stride_dv=dv.stride(0),
        TILE=tables.TILE,
        ROWS=32,
        **sizes,
    )
    return dq, dk
