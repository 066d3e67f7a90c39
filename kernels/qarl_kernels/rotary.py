"""Rotary embedding of queries and keys from the fused qkv product, with the norm per head before it (Qwen3).

`rotary_forward` returns keys and values for the learner; `rotary_into_pages` writes them straight into the sampler's
paged KV cache. Both run one kernel.

Values are rounded where Hugging Face's `apply_rotary_pos_emb` rounds 16-bit tensors: after each product with cosine or
sine, and after their sum; the norm is that of `qarl_kernels.pointwise.rms_norm`. A head's bits depend on that head
alone.

A thread holds eight values of the first half of a head, and the eight of the second half that they rotate with;
cosines, sines and norm weights stay in registers for several heads of a token.

If the sampler's KV cache is e4m3, keys are rounded to it after the rotation, and values as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import narrow, round_e4m3, round_pairs, widen
from qarl_kernels.flash.pairs import in_pairs
from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.launch import launch
from qarl_kernels.quantize_kernels import repeat_each
from qarl_kernels.rows import VECTOR, check_rows, inside, row_sum

HEADS, WARPS = 4, 4  # per program
FEW_ROWS = 512  # up to this many rows a program of `rotary_into_pages` has one head and one warp: enough programs

_VECTOR = tl.constexpr(VECTOR)


class Rotation(NamedTuple):
    """How to turn the output of qkv_proj, (T, (heads + 2 * kv_heads) * D), into queries, keys and values.

    Attributes:
        heads, kv_heads: Numbers of heads.
        head_dim: D, even.
        cos, sin: (positions, D) of the product's dtype, contiguous.
        positions: (T,) int64, row of cos and sin of each token.
        q_norm, k_norm: (D,) weights of the norms, of the product's dtype, or None.
        eps: Epsilon of the norms.
        kv_fp8: Whether keys and values are rounded to e4m3, with scale 1.
    """

    heads: int
    kv_heads: int
    head_dim: int
    cos: Tensor
    sin: Tensor
    positions: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    kv_fp8: bool = False

    @property
    def columns(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def values(self, qkv: Tensor) -> Tensor:
        """Return a view of the values (T, kv_heads, D) in a product (T, columns), not rounded."""
        dim = self.head_dim
        start = qkv.storage_offset() + (self.heads + self.kv_heads) * dim
        return qkv.as_strided((qkv.shape[0], self.kv_heads, dim), (qkv.stride(0), dim, 1), start)

    def arguments(self, qkv: Tensor) -> dict[str, Any]:
        """Return the arguments common to all rotary kernels. qkv: (T, columns) bf16 or fp16, any row stride."""
        check_rows("qkv", qkv, self.columns)
        return {
            "qkv": qkv,
            "cos": self.cos,
            "sin": self.sin,
            "positions": self.positions,
            "q_norm": self.q_norm,
            "k_norm": self.k_norm,
            "rows": qkv.shape[0],
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "stride": qkv.stride(0),
            "eps": float(self.eps),
        }


@triton.jit
def halves(start, keep, HALF: tl.constexpr):
    """Load two tiles (T, 8): at the pointers `start` (T,), and half a head later."""
    at = start[:, None] + tl.arange(0, _VECTOR)[None, :]
    return tl.load(at, keep, other=0.0), tl.load(at + HALF, keep, other=0.0)


@triton.jit
def exists(head, heads, column):
    """Return head < heads per vector (T, 1); Triton's interpreter turns `mask & scalar` into an integer."""
    return (head + 0 * column < heads)[:, None]


@triton.jit
def store_halves(start, keep, first, second, HALF: tl.constexpr, FP8: tl.constexpr = False):
    """Store two tiles (T, 8) where `halves` would load them. FP8: round the 16-bit values to e4m3.

    If `start` points to int16, the two halves are interleaved, see `flash/pairs.py`.
    """
    at = start[:, None] + tl.arange(0, _VECTOR)[None, :]
    if FP8 and start.dtype.element_ty == tl.int16:
        tl.store(at, round_pairs(first, second), keep)
    else:
        if FP8:
            first = round_e4m3(first, start.dtype.element_ty)
            second = round_e4m3(second, start.dtype.element_ty)
        tl.store(at, first, keep)
        tl.store(at + HALF, second, keep)


@triton.jit
def inverse_norm(first, second, eps, HALF: tl.constexpr, TOKENS: tl.constexpr, VECTORS: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) of each token's head, repeated for its vectors, (T, 1)."""
    total = row_sum(widen(first) * widen(first) + widen(second) * widen(second), TOKENS, VECTORS)
    mean = tl.div_rn(total, tl.full(total.shape, 2 * HALF, tl.float32))
    inverse = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    return repeat_each(inverse, VECTORS)[:, None]


@triton.jit
def _round(x, dtype: tl.constexpr):
    return widen(narrow(x, dtype))


@triton.jit
def copy_heads(
    source, into, pitch, head, heads, column, stored,
    HALF: tl.constexpr, HEADS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Copy heads [head, head + HEADS) of some tokens, rounded to e4m3 if FP8; arguments as in `rotate_heads`."""
    for i in tl.static_range(HEADS):
        present = stored & exists(head + i, heads, column)
        first, second = halves(source + (head + i) * (2 * HALF) + column, present, HALF)
        store_halves(into + (head + i) * pitch + column, present, first, second, HALF, FP8)


@triton.jit
def rotate_heads(
    source, into, pitch, weight, head, heads, column, keep, stored, cosines, sines, eps,
    HALF: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, VECTORS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Normalize (if there is a weight) and rotate heads [head, head + HEADS) of `heads` of some tokens.

    source, into: (T,) pointers to the first head of each vector's token. pitch: stride of the heads of `into`. column:
    (T,), column of each vector in a head. keep: mask of existing vectors; stored: mask of vectors to store. cosines,
    sines: pairs of (T, 8). FP8: round the result to e4m3.
    """
    dtype: tl.constexpr = cosines[0].dtype
    cos_first, cos_second = widen(cosines[0]), widen(cosines[1])
    sin_first, sin_second = widen(sines[0]), widen(sines[1])
    if weight is not None:
        weights = halves(weight + column, keep, HALF)
    for i in tl.static_range(HEADS):
        present = exists(head + i, heads, column)
        first, second = halves(source + (head + i) * (2 * HALF) + column, keep & present, HALF)
        if weight is not None:
            inverse = inverse_norm(first, second, eps, HALF, TOKENS, VECTORS)
            first = narrow(widen(weights[0]) * _round(widen(first) * inverse, dtype), dtype)
            second = narrow(widen(weights[1]) * _round(widen(second) * inverse, dtype), dtype)
        left, right = widen(first), widen(second)
        rotated_left = _round(left * cos_first, dtype) - _round(right * sin_first, dtype)
        rotated_right = _round(right * cos_second, dtype) + _round(left * sin_second, dtype)
        first, second = narrow(rotated_left, dtype), narrow(rotated_right, dtype)
        store_halves(into + (head + i) * pitch + column, stored & present, first, second, HALF, FP8)


@triton.jit(do_not_specialize=["rows"])
def _rotary_kernel(
    qkv,  # (rows, (heads + 2 * kv_heads) * D) bf16 or fp16
    q,  # (rows, heads, D)
    k,  # (pages, kv_heads, PAGE, D), D contiguous; of qkv's dtype, e4m3, or int16 holding pairs (flash/pairs.py)
    v,  # like k; None: values are not copied
    slots,  # (rows,) i64, page * PAGE + offset, negative: not written; None: page 0, offset = row
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
    if slots is None:
        k_at, v_at, stored = token * stride_k, token * stride_v, keep
    else:
        slot = tl.load(slots + token, token < rows, other=-1)
        page, offset = slot // PAGE, slot % PAGE
        stored = keep & (slot >= 0)[:, None]
        k_at, v_at = page * stride_k_page + offset * stride_k, page * stride_v_page + offset * stride_v
    source = qkv + token * stride
    block, blocks, kv_blocks = tl.program_id(1), tl.cdiv(heads, HEADS), tl.cdiv(kv_heads, HEADS)
    if block < blocks + kv_blocks:
        cosines, sines = halves(cos + position, keep, HALF), halves(sin + position, keep, HALF)
        if block < blocks:
            rotate_heads(
                source, q + token * (heads * 2 * HALF), 2 * HALF, q_norm, block * HEADS, heads, column, keep, keep,
                cosines, sines, eps, HALF, HEADS, TOKENS, VECTORS, False,
            )  # fmt: skip
        else:
            rotate_heads(
                source + heads * (2 * HALF), k + k_at, stride_k_head, k_norm, ((block - blocks) * HEADS).to(tl.int64),
                kv_heads, column, keep, stored, cosines, sines, eps, HALF, HEADS, TOKENS, VECTORS, FP8,
            )  # fmt: skip
    elif v is not None:
        copy_heads(
            source + (heads + kv_heads) * (2 * HALF), v + v_at, stride_v_head,
            ((block - blocks - kv_blocks) * HEADS).to(tl.int64), kv_heads, column, stored, HALF, HEADS, FP8,
        )  # fmt: skip


def tile_of_heads(head_dim: int, warps: int) -> dict[str, int | bool]:
    """Return how the threads of a program divide tokens and vectors of a head; the warps do not change a bit."""
    vectors = next_power_of_2(cdiv(head_dim // 2, VECTOR))
    tokens = max(1, 32 * warps // vectors)
    return {"HALF": head_dim // 2, "TOKENS": tokens, "VECTORS": vectors, "RAGGED": head_dim // 2 % VECTOR != 0}


def _rotate(
    qkv: Tensor,
    rotation: Rotation,
    k: Tensor,
    v: Tensor | None,
    slots: Tensor | None,
    per_program: int,
    warps: int,
) -> Tensor:
    """Launch the kernel and return the queries (T, heads, D).

    k, v: (P, kv_heads, PAGE, D) with slots, (T, kv_heads, D) without. per_program, warps: heads and warps of a program,
    which change no bit.
    """
    rows, heads, kv_heads = qkv.shape[0], rotation.heads, rotation.kv_heads
    q = torch.empty(rows, heads, rotation.head_dim, dtype=qkv.dtype, device=qkv.device)
    shape = tile_of_heads(rotation.head_dim, warps)
    blocks = cdiv(heads, per_program) + (1 if v is None else 2) * cdiv(kv_heads, per_program)
    launch(
        _rotary_kernel,
        (cdiv(rows, shape["TOKENS"]), blocks),
        num_warps=warps,
        q=q,
        k=k,
        v=v,
        slots=slots,
        PAGE=0 if slots is None else k.shape[2],
        HEADS=per_program,
        FP8=rotation.kv_fp8,
        **_strides("k", k),
        **_strides("v", v),
        **rotation.arguments(qkv),
        **shape,
    )
    return q


def _strides(name: str, x: Tensor | None) -> dict[str, int]:
    """Return the strides of keys or values as kernel arguments."""
    if x is None:
        page, head, token = 0, 0, 0
    elif x.ndim == 3:
        page, head, token = 0, x.stride(1), x.stride(0)
    else:
        page, head, token, _ = x.stride()
    return {f"stride_{name}_page": page, f"stride_{name}_head": head, f"stride_{name}": token}


def rotary_forward(qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize (if the model has norms) and rotate queries and keys.

    Args:
        qkv: (T, columns) bf16 or fp16, last dimension contiguous, arbitrary row stride.
        rotation: Layout, angles and norms.

    Returns:
        Queries (T, heads, D), keys and values (T, kv_heads, D), of qkv's dtype. Values are a view of qkv, except with
        `kv_fp8`, which rounds keys and values to e4m3.
    """
    k = torch.empty(qkv.shape[0], rotation.kv_heads, rotation.head_dim, dtype=qkv.dtype, device=qkv.device)
    v = torch.empty_like(k) if rotation.kv_fp8 else None
    q = _rotate(qkv, rotation, k, v, None, HEADS, WARPS)
    return q, k, rotation.values(qkv) if v is None else v


def rotary_into_pages(qkv: Tensor, rotation: Rotation, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    """Compute `rotary_forward`, and write its keys and values to their slots of the cache.

    Args:
        qkv, rotation: As for `rotary_forward`.
        k_cache, v_cache: (P, kv_heads, PAGE, D), last dimension contiguous, other strides arbitrary. Of qkv's dtype, or
            float8_e4m3fn with `kv_fp8`, with features in the order of `flash/pairs.py`.
        slots: (T,) int64, page * PAGE + offset of each token, all different; negative: the token is not written.

    Returns:
        Queries (T, heads, D).
    """
    for cache in (k_cache, v_cache):
        fits = cache.dtype == qkv.dtype or (cache.dtype == torch.float8_e4m3fn and rotation.kv_fp8)
        if not fits or cache.shape[1::2] != (rotation.kv_heads, rotation.head_dim):
            raise ValueError(
                f"a cache of {cache.dtype} {tuple(cache.shape)} does not take {rotation.kv_heads} heads of "
                f"{rotation.head_dim} {qkv.dtype}"
            )
        if cache.stride(3) != 1:
            raise ValueError(f"the cache's last dimension must be contiguous; its strides are {cache.stride()}")
    per_program, warps = (1, 1) if qkv.shape[0] <= FEW_ROWS else (HEADS, WARPS)
    return _rotate(qkv, rotation, in_pairs(k_cache), in_pairs(v_cache), slots, per_program, warps)
