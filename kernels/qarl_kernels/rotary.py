"""Rotary embedding of queries and keys out of the fused product, with the norm over a head before it (Qwen3).

Values are rounded where Hugging Face's `apply_rotary_pos_emb` rounds 16-bit tensors: each product with the cosine
or the sine, and their sum; the norm is that of `qarl_kernels.pointwise.rms_norm`. A head's bits depend on that head
alone.

A thread has eight values of the first half of a head and the eight that they turn with in the second half; cosines,
sines and weights stay in registers for some heads of the same token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import narrow, widen
from qarl_kernels.column_sum import add_partial_sums
from qarl_kernels.launch import launch
from qarl_kernels.quantize_kernels import _of_group
from qarl_kernels.rows import VECTOR, check_rows, inside, row_sum

HEADS, WARPS = 4, 4  # of a program
BACKWARD_PROGRAMS = 1056  # at most, where weights have gradients, whose partial sums depend on it

_VECTOR = tl.constexpr(VECTOR)


@triton.jit
def _halves(start, keep, HALF: tl.constexpr):
    """Two times eight values (T, 8), at `start` (T,) and half a head on."""
    at = start[:, None] + tl.arange(0, _VECTOR)[None, :]
    return tl.load(at, keep, other=0.0), tl.load(at + HALF, keep, other=0.0)


@triton.jit
def _exists(head, heads, column):
    """head < heads for each vector (T, 1): the interpreter makes an integer of a mask & a scalar."""
    return (head + 0 * column < heads)[:, None]


@triton.jit
def _store_halves(start, keep, first, second, HALF: tl.constexpr):
    at = start[:, None] + tl.arange(0, _VECTOR)[None, :]
    tl.store(at, first, keep)
    tl.store(at + HALF, second, keep)


@triton.jit
def _inverse(first, second, eps, HALF: tl.constexpr, TOKENS: tl.constexpr, VECTORS: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of each token's head, for each of its vectors (T, 1)."""
    total = row_sum(widen(first) * widen(first) + widen(second) * widen(second), TOKENS, VECTORS)
    mean = tl.div_rn(total, tl.full(total.shape, 2 * HALF, tl.float32))
    inverse = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    return _of_group(inverse, VECTORS)[:, None]


@triton.jit
def _round(x, dtype: tl.constexpr):
    return widen(narrow(x, dtype))


@triton.jit
def _forward_heads(
    source, out, weight, head, heads, token, keep, column, cosines, sines, stride, eps,
    HALF: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Heads [head, head + HEADS) of `heads`. source, out: the first head of token 0; cosines, sines: pairs (T, 8)."""
    dtype: tl.constexpr = out.dtype.element_ty
    cos_first, cos_second = widen(cosines[0]), widen(cosines[1])
    sin_first, sin_second = widen(sines[0]), widen(sines[1])
    if weight is not None:
        weights = _halves(weight + column, keep, HALF)
    for i in tl.static_range(HEADS):
        present = keep & _exists(head + i, heads, column)
        at = (head + i) * (2 * HALF) + column
        first, second = _halves(source + token * stride + at, present, HALF)
        if weight is not None:
            inverse = _inverse(first, second, eps, HALF, TOKENS, VECTORS)
            first = narrow(widen(weights[0]) * _round(widen(first) * inverse, dtype), dtype)
            second = narrow(widen(weights[1]) * _round(widen(second) * inverse, dtype), dtype)
        left, right = widen(first), widen(second)
        turned_left = _round(left * cos_first, dtype) - _round(right * sin_first, dtype)
        turned_right = _round(right * cos_second, dtype) + _round(left * sin_second, dtype)
        to = out + token * (heads * 2 * HALF) + at
        _store_halves(to, present, narrow(turned_left, dtype), narrow(turned_right, dtype), HALF)


@triton.jit
def _forward_kernel(
    qkv,  # (rows, (heads + 2 * kv_heads) * D) bf16 or fp16
    q,  # (rows, heads, D)
    k,  # (rows, kv_heads, D)
    cos,  # (positions, D)
    sin,  # (positions, D)
    positions,  # (rows,) i64
    q_norm,  # (D,), or None
    k_norm,  # (D,), or None
    rows,
    heads,
    kv_heads,
    stride,
    eps,
    HALF: tl.constexpr,  # D / 2
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    VECTORS: tl.constexpr,
    RAGGED: tl.constexpr,  # HALF is not a multiple of 8
):
    t = tl.arange(0, TOKENS * VECTORS)
    token = (tl.program_id(0) * TOKENS + t // VECTORS).to(tl.int64)
    column = t % VECTORS * _VECTOR
    keep = inside(token < rows, column, HALF, RAGGED)
    position = tl.load(positions + token, token < rows, other=0) * (2 * HALF) + column
    cosines, sines = _halves(cos + position, keep, HALF), _halves(sin + position, keep, HALF)
    block, blocks = tl.program_id(1), tl.cdiv(heads, HEADS)
    if block < blocks:
        _forward_heads(
            qkv, q, q_norm, block * HEADS, heads, token, keep, column, cosines, sines, stride, eps,
            HALF, HEADS, TOKENS, VECTORS,
        )  # fmt: skip
    else:
        _forward_heads(
            qkv + heads * (2 * HALF), k, k_norm, (block - blocks) * HEADS, kv_heads, token, keep, column, cosines,
            sines, stride, eps, HALF, HEADS, TOKENS, VECTORS,
        )  # fmt: skip


@triton.jit
def _backward_heads(
    grad, source, into, weight, partial, cos, sin, positions, rows, head, heads, stride_grad, stride, stride_into, eps,
    HALF: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, VECTORS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Heads [head, head + HEADS) of `heads` for some of the tokens; partial: (programs, D), sums of each."""
    dtype: tl.constexpr = into.dtype.element_ty
    t = tl.arange(0, TOKENS * VECTORS)
    column = t % VECTORS * _VECTOR
    sum_left = tl.zeros([TOKENS * VECTORS, _VECTOR], tl.float32)
    sum_right = tl.zeros([TOKENS * VECTORS, _VECTOR], tl.float32)
    for start in range(tl.program_id(0) * TOKENS, rows, tl.num_programs(0) * TOKENS):
        token = (start + t // VECTORS).to(tl.int64)
        keep = inside(token < rows, column, HALF, RAGGED)
        position = tl.load(positions + token, token < rows, other=0) * (2 * HALF) + column
        cosines, sines = _halves(cos + position, keep, HALF), _halves(sin + position, keep, HALF)
        for i in tl.static_range(HEADS):
            present = keep & _exists(head + i, heads, column)
            at = (head + i) * (2 * HALF) + column
            left, right = _halves(grad + token * stride_grad + at, present, HALF)
            left, right = widen(left), widen(right)
            grad_left = left * widen(cosines[0]) + right * widen(sines[1])
            grad_right = right * widen(cosines[1]) - left * widen(sines[0])
            if weight is not None:
                first, second = _halves(source + token * stride + at, present, HALF)
                weights = _halves(weight + column, keep, HALF)
                inverse = _inverse(first, second, eps, HALF, TOKENS, VECTORS)
                first, second = widen(first) * inverse, widen(second) * inverse
                # A token that does not exist has 0 * inf where eps is 0.
                sum_left += tl.where(present, grad_left * first, 0.0)
                sum_right += tl.where(present, grad_right * second, 0.0)
                grad_left *= widen(weights[0])
                grad_right *= widen(weights[1])
                total = row_sum(grad_left * first + grad_right * second, TOKENS, VECTORS)
                mean = tl.div_rn(total, tl.full(total.shape, 2 * HALF, tl.float32))
                mean = _of_group(mean, VECTORS)[:, None]
                grad_left = (grad_left - first * mean) * inverse
                grad_right = (grad_right - second * mean) * inverse
            to = into + token * stride_into + at
            _store_halves(to, present, narrow(grad_left, dtype), narrow(grad_right, dtype), HALF)
    if weight is not None:
        left = tl.sum(tl.reshape(sum_left, [TOKENS, VECTORS, _VECTOR]), axis=0)
        right = tl.sum(tl.reshape(sum_right, [TOKENS, VECTORS, _VECTOR]), axis=0)
        program = tl.program_id(0) * tl.cdiv(heads, HEADS) + head // HEADS
        column = tl.arange(0, VECTORS) * _VECTOR
        keep = inside(column >= 0, column, HALF, RAGGED)
        _store_halves(partial + program * (2 * HALF) + column, keep, left, right, HALF)


@triton.jit
def _backward_kernel(
    dq,  # (rows, heads, D) bf16 or fp16
    dk,  # (rows, kv_heads, D)
    qkv,  # (rows, (heads + 2 * kv_heads) * D); read where there is a norm
    dqkv,  # as qkv
    cos,  # (positions, D)
    sin,  # (positions, D)
    positions,  # (rows,) i64
    q_norm,  # (D,), or None
    k_norm,  # (D,), or None
    partial_q,  # (programs, D) f32: of each program of queries, the sum for the weight's gradient; None without norm
    partial_k,  # the same of keys
    rows,
    heads,
    kv_heads,
    stride_dq,
    stride_dk,
    stride,
    stride_into,
    eps,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    VECTORS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    block, blocks = tl.program_id(1), tl.cdiv(heads, HEADS)
    if block < blocks:
        _backward_heads(
            dq, qkv, dqkv, q_norm, partial_q, cos, sin, positions, rows, block * HEADS, heads, stride_dq, stride,
            stride_into, eps, HALF, HEADS, TOKENS, VECTORS, RAGGED,
        )  # fmt: skip
    else:
        skip = heads * (2 * HALF)
        _backward_heads(
            dk, qkv + skip, dqkv + skip, k_norm, partial_k, cos, sin, positions, rows, (block - blocks) * HEADS,
            kv_heads, stride_dk, stride, stride_into, eps, HALF, HEADS, TOKENS, VECTORS, RAGGED,
        )  # fmt: skip


def _tile(head_dim: int, warps: int) -> dict[str, int | bool]:
    vectors = triton.next_power_of_2(triton.cdiv(head_dim // 2, VECTOR))
    tokens = max(1, 32 * warps // vectors)
    return {"HALF": head_dim // 2, "TOKENS": tokens, "VECTORS": vectors, "RAGGED": head_dim // 2 % VECTOR != 0}


def rotary_forward(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    tile: tuple[int, int] = (HEADS, WARPS),
) -> tuple[Tensor, Tensor]:
    """Queries (T, heads, D) and keys (T, kv_heads, D), each normalized if it has a norm, then turned.

    Args:
        qkv: bf16 or fp16 (T, (heads + 2 * kv_heads) * D): queries, keys, values; rows contiguous, any distance apart.
        head_dim: D, even.
        cos, sin: (positions, D) of qkv's dtype, contiguous. positions: (T,) int64, their row for each token.
        q_norm, k_norm: weights (D,) of qkv's dtype, or None. eps: of the norms.
        tile: heads and warps of a program, for tuning; changes no bit.
    """
    check_rows("qkv", qkv, (heads + 2 * kv_heads) * head_dim)
    rows, (per_program, warps) = qkv.shape[0], tile
    q = torch.empty(rows, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(rows, kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    shape = _tile(head_dim, warps)
    launch(
        _forward_kernel,
        (triton.cdiv(rows, shape["TOKENS"]), triton.cdiv(heads, per_program) + triton.cdiv(kv_heads, per_program)),
        num_warps=warps,
        qkv=qkv,
        q=q,
        k=k,
        cos=cos,
        sin=sin,
        positions=positions,
        q_norm=q_norm,
        k_norm=k_norm,
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        stride=qkv.stride(0),
        eps=float(eps),
        HEADS=per_program,
        **shape,
    )
    return q, k


def rotary_backward(
    dq: Tensor,
    dk: Tensor,
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    dqkv: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    grad_q_norm: Tensor | None = None,
    grad_k_norm: Tensor | None = None,
    tile: tuple[int, int] = (HEADS, WARPS),
    programs: int = BACKWARD_PROGRAMS,
) -> None:
    """Writes the gradients of queries and keys into dqkv, whose last kv_heads * D columns are left as they are.

    Args:
        dq, dk: (T, heads, D) and (T, kv_heads, D) 16-bit, heads contiguous, tokens any distance apart.
        dqkv: as qkv, which is read where there is a norm. The rest is as for `rotary_forward`.
        grad_q_norm, grad_k_norm: float32 (D,), contiguous, which the weights' gradients are added into, or None. The
            same inputs add the same bits.
        tile, programs: how the work is cut, for tuning.
    """
    columns = (heads + 2 * kv_heads) * head_dim
    check_rows("qkv", qkv, columns)
    check_rows("dqkv", dqkv, columns)
    for name, x in (("dq", dq), ("dk", dk)):
        if x.stride(-1) != 1 or x.stride(1) != head_dim:
            raise ValueError(f"{name} must have contiguous heads, not strides {x.stride()}")
    rows, (per_program, warps) = qkv.shape[0], tile
    shape = _tile(head_dim, warps)
    blocks = triton.cdiv(heads, per_program), triton.cdiv(kv_heads, per_program)
    tokens = triton.cdiv(rows, shape["TOKENS"])
    if q_norm is not None or k_norm is not None:
        tokens = min(tokens, max(1, programs // sum(blocks)))
    partials = [
        None if norm is None else torch.empty(tokens * n, head_dim, dtype=torch.float32, device=qkv.device)
        for norm, n in zip((q_norm, k_norm), blocks, strict=True)
    ]
    launch(
        _backward_kernel,
        (tokens, sum(blocks)),
        num_warps=warps,
        dq=dq,
        dk=dk,
        qkv=qkv,
        dqkv=dqkv,
        cos=cos,
        sin=sin,
        positions=positions,
        q_norm=q_norm,
        k_norm=k_norm,
        partial_q=partials[0],
        partial_k=partials[1],
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        stride_dq=dq.stride(0),
        stride_dk=dk.stride(0),
        stride=qkv.stride(0),
        stride_into=dqkv.stride(0),
        eps=float(eps),
        HEADS=per_program,
        **shape,
    )
    for partial, grad in zip(partials, (grad_q_norm, grad_k_norm), strict=True):
        if partial is not None and grad is not None:
            add_partial_sums(partial, grad)
