"""Rotary embedding like `qarl_kernels.rotary`, writing keys and values straight into a paged KV cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.flash.pairs import in_pairs
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch
from qarl_kernels.plans import planned
from qarl_kernels.rotary import HEADS, WARPS, Rotation, copied_heads, halves, tile_of_heads, turned_heads
from qarl_kernels.rows import VECTOR, inside

FEW_ROWS = 512  # up to this many rows a program has one head and one warp, so that there are enough programs

_VECTOR = tl.constexpr(VECTOR)


@triton.jit(do_not_specialize=["rows"])
def _paged_kernel(
    qkv,  # (rows, (heads + 2 * kv_heads) * D) bf16 or fp16
    q,  # (rows, heads, D)
    k_cache,  # (pages, kv_heads, PAGE, D), D contiguous; of qkv's dtype, e4m3, or int16 of pairs (flash/pairs.py)
    v_cache,  # the same
    slots,  # (rows,) i64, page * PAGE + offset; negative: not written
    cos,  # (positions, D)
    sin,  # (positions, D)
    positions,  # (rows,) i64
    q_norm,  # (D,), or None
    k_norm,  # (D,), or None
    rows,
    heads,
    kv_heads,
    stride,
    stride_k_page,
    stride_k_head,
    stride_k,
    stride_v_page,
    stride_v_head,
    stride_v,
    eps,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    VECTORS: tl.constexpr,
    RAGGED: tl.constexpr,  # HALF is not a multiple of 8
    FP8: tl.constexpr,  # keys and values are rounded to e4m3
):
    t = tl.arange(0, TOKENS * VECTORS)
    token = (tl.program_id(0) * TOKENS + t // VECTORS).to(tl.int64)
    column = t % VECTORS * _VECTOR
    keep = inside(token < rows, column, HALF, RAGGED)
    position = tl.load(positions + token, token < rows, other=0) * (2 * HALF) + column
    slot = tl.load(slots + token, token < rows, other=-1)
    page, offset = slot // PAGE, slot % PAGE
    stored = keep & (slot >= 0)[:, None]
    source = qkv + token * stride
    block, blocks, kv_blocks = tl.program_id(1), tl.cdiv(heads, HEADS), tl.cdiv(kv_heads, HEADS)
    if block < blocks + kv_blocks:
        cosines, sines = halves(cos + position, keep, HALF), halves(sin + position, keep, HALF)
        if block < blocks:
            turned_heads(
                source, q + token * (heads * 2 * HALF), 2 * HALF, q_norm, block * HEADS, heads, column, keep, keep,
                cosines, sines, eps, HALF, HEADS, TOKENS, VECTORS, False,
            )  # fmt: skip
        else:
            turned_heads(
                source + heads * (2 * HALF), k_cache + page * stride_k_page + offset * stride_k, stride_k_head, k_norm,
                ((block - blocks) * HEADS).to(tl.int64), kv_heads, column, keep, stored, cosines, sines, eps,
                HALF, HEADS, TOKENS, VECTORS, FP8,
            )  # fmt: skip
    else:
        copied_heads(
            source + (heads + kv_heads) * (2 * HALF), v_cache + page * stride_v_page + offset * stride_v, stride_v_head,
            ((block - blocks - kv_blocks) * HEADS).to(tl.int64), kv_heads, column, stored, HALF, HEADS, FP8,
        )  # fmt: skip


def rotary_into_pages(
    qkv: Tensor,
    rotation: Rotation,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """Compute `rotary_forward`, and write its keys and values to their slots of the cache.

    Args:
        qkv, rotation: As for `rotary_forward`.
        k_cache, v_cache: (P, kv_heads, PAGE, D), last dimension contiguous, other strides arbitrary. Of qkv's dtype, or
            float8_e4m3fn with `kv_fp8`, with features in the order of `flash/pairs.py`.
        slots: (T,) int64, page * PAGE + offset of each token, all different; negative: the token is not written.
        tile: Heads and warps of a program, for tuning; changes no bit.

    Returns:
        Queries (T, heads, D).
    """
    return _into_pages(qkv, k_cache, v_cache, slots, *(tile or (None, None)), *rotation)


@planned
def _into_pages(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    per_program: int | None,
    warps: int | None,
    *fields: Any,
) -> Tensor:
    """Of a rotation's fields; a program has its heads and warps by the rows where none are given."""
    rotation = Rotation(*fields)
    for cache in (k_cache, v_cache):
        fits = cache.dtype == qkv.dtype or (cache.dtype == torch.float8_e4m3fn and rotation.kv_fp8)
        if not fits or cache.shape[1::2] != (rotation.kv_heads, rotation.head_dim):
            raise ValueError(
                f"a cache of {cache.dtype} {tuple(cache.shape)} does not take {rotation.kv_heads} heads of "
                f"{rotation.head_dim} {qkv.dtype}"
            )
        if cache.stride(3) != 1:
            raise ValueError(f"the cache's last dimension must be contiguous; its strides are {cache.stride()}")
    k_cache, v_cache, page = in_pairs(k_cache), in_pairs(v_cache), k_cache.shape[2]
    rows = qkv.shape[0]
    if per_program is None or warps is None:
        per_program, warps = (1, 1) if rows <= FEW_ROWS else (HEADS, WARPS)
    q = torch.empty(rows, rotation.heads, rotation.head_dim, dtype=qkv.dtype, device=qkv.device)
    shape = tile_of_heads(rotation.head_dim, warps)
    blocks = cdiv(rotation.heads, per_program) + 2 * cdiv(rotation.kv_heads, per_program)
    launch(
        _paged_kernel,
        (cdiv(rows, shape["TOKENS"]), blocks),
        num_warps=warps,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        slots=slots,
        stride_k_page=k_cache.stride(0),
        stride_k_head=k_cache.stride(1),
        stride_k=k_cache.stride(2),
        stride_v_page=v_cache.stride(0),
        stride_v_head=v_cache.stride(1),
        stride_v=v_cache.stride(2),
        PAGE=page,
        HEADS=per_program,
        FP8=rotation.kv_fp8,
        **rotation.arguments(qkv),
        **shape,
    )
    return q
