"""Gradient of `qarl_kernels.rotary`: of queries and keys in the fused product, and of the norms' weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import narrow, widen
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch
from qarl_kernels.quantize_kernels import repeat_each
from qarl_kernels.rotary import (
    HEADS,
    WARPS,
    Rotation,
    exists,
    halves,
    inverse_norm,
    store_halves,
    tile_of_heads,
)
from qarl_kernels.rows import VECTOR, check_rows, inside, row_sum
from qarl_kernels.token_sums import add_partial_sums

PROGRAMS = 1056  # limit with norms, whose weights' partial sums depend on the number of programs

_VECTOR = tl.constexpr(VECTOR)


@triton.jit
def _backward_heads(
    grad, source, into, weight, partial, cos, sin, positions, rows, head, heads, stride_grad, stride, stride_into, eps,
    HALF: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, VECTORS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Backward of heads [head, head + HEADS) of `heads` for some tokens; partial: (programs, D) f32 sums."""
    dtype: tl.constexpr = into.dtype.element_ty
    t = tl.arange(0, TOKENS * VECTORS)
    column = t % VECTORS * _VECTOR
    sum_left = tl.zeros([TOKENS * VECTORS, _VECTOR], tl.float32)
    sum_right = tl.zeros([TOKENS * VECTORS, _VECTOR], tl.float32)
    for start in range(tl.program_id(0) * TOKENS, rows, tl.num_programs(0) * TOKENS):
        token = (start + t // VECTORS).to(tl.int64)
        keep = inside(token < rows, column, HALF, RAGGED)
        position = tl.load(positions + token, token < rows, other=0) * (2 * HALF) + column
        cosines, sines = halves(cos + position, keep, HALF), halves(sin + position, keep, HALF)
        for i in tl.static_range(HEADS):
            present = keep & exists(head + i, heads, column)
            at = (head + i) * (2 * HALF) + column
            left, right = halves(grad + token * stride_grad + at, present, HALF)
            left, right = widen(left), widen(right)
            grad_left = left * widen(cosines[0]) + right * widen(sines[1])
            grad_right = right * widen(cosines[1]) - left * widen(sines[0])
            if weight is not None:
                first, second = halves(source + token * stride + at, present, HALF)
                weights = halves(weight + column, keep, HALF)
                inverse = inverse_norm(first, second, eps, HALF, TOKENS, VECTORS)
                first, second = widen(first) * inverse, widen(second) * inverse
                # Rows past the end would give 0 * inf if eps is 0.
                sum_left += tl.where(present, grad_left * first, 0.0)
                sum_right += tl.where(present, grad_right * second, 0.0)
                grad_left *= widen(weights[0])
                grad_right *= widen(weights[1])
                total = row_sum(grad_left * first + grad_right * second, TOKENS, VECTORS)
                mean = tl.div_rn(total, tl.full(total.shape, 2 * HALF, tl.float32))
                mean = repeat_each(mean, VECTORS)[:, None]
                grad_left = (grad_left - first * mean) * inverse
                grad_right = (grad_right - second * mean) * inverse
            to = into + token * stride_into + at
            store_halves(to, present, narrow(grad_left, dtype), narrow(grad_right, dtype), HALF)
    if weight is not None:
        left = tl.sum(tl.reshape(sum_left, [TOKENS, VECTORS, _VECTOR]), axis=0)
        right = tl.sum(tl.reshape(sum_right, [TOKENS, VECTORS, _VECTOR]), axis=0)
        program = tl.program_id(0) * tl.cdiv(heads, HEADS) + head // HEADS
        column = tl.arange(0, VECTORS) * _VECTOR
        keep = inside(column >= 0, column, HALF, RAGGED)
        store_halves(partial + program * (2 * HALF) + column, keep, left, right, HALF)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    dq,  # (rows, heads, D) bf16 or fp16
    dk,  # (rows, kv_heads, D)
    qkv,  # (rows, (heads + 2 * kv_heads) * D); read only with norms
    dqkv,  # as qkv
    cos,  # (positions, D)
    sin,  # (positions, D)
    positions,  # (rows,) i64
    q_norm,  # (D,), or None
    k_norm,  # (D,), or None
    partial_q,  # (programs, D) f32, each program's part of the q_norm gradient; None without norm
    partial_k,  # the same for k_norm
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


def rotary_backward(
    dq: Tensor,
    dk: Tensor,
    qkv: Tensor,
    rotation: Rotation,
    dqkv: Tensor,
    grad_q_norm: Tensor | None = None,
    grad_k_norm: Tensor | None = None,
) -> None:
    """Write the gradients of queries and keys into dqkv; its last kv_heads * D columns are not touched.

    Args:
        dq, dk: (T, heads, D) and (T, kv_heads, D) 16-bit, heads contiguous, arbitrary token stride.
        qkv, rotation: As for `rotary_forward`; qkv is read only with norms.
        dqkv: Like qkv.
        grad_q_norm, grad_k_norm: (D,) float32, contiguous, to which the norms' gradients are added, deterministically;
            or None.
    """
    arguments, head_dim = rotation.arguments(qkv), rotation.head_dim
    check_rows("dqkv", dqkv, rotation.columns)
    for name, x in (("dq", dq), ("dk", dk)):
        if x.stride(-1) != 1 or x.stride(1) != head_dim:
            raise ValueError(f"{name} must have contiguous heads, not strides {x.stride()}")
    shape, norms = tile_of_heads(head_dim, WARPS), (rotation.q_norm, rotation.k_norm)
    blocks = cdiv(rotation.heads, HEADS), cdiv(rotation.kv_heads, HEADS)
    tokens = cdiv(qkv.shape[0], shape["TOKENS"])
    if any(norm is not None for norm in norms):
        tokens = min(tokens, max(1, PROGRAMS // sum(blocks)))
    partials = [
        None if norm is None else torch.empty(tokens * n, head_dim, dtype=torch.float32, device=qkv.device)
        for norm, n in zip(norms, blocks, strict=True)
    ]
    launch(
        _backward_kernel,
        (tokens, sum(blocks)),
        num_warps=WARPS,
        dq=dq,
        dk=dk,
        dqkv=dqkv,
        partial_q=partials[0],
        partial_k=partials[1],
        stride_dq=dq.stride(0),
        stride_dk=dk.stride(0),
        stride_into=dqkv.stride(0),
        HEADS=HEADS,
        **arguments,
        **shape,
    )
    for partial, grad in zip(partials, (grad_q_norm, grad_k_norm), strict=True):
        if partial is not None and grad is not None:
            add_partial_sums(partial, grad)
