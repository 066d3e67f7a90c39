"""The two products of a grouped linear layer's backward: 16-bit operands, FP32 sums.

    dx_r = dy_r @ W_e          with e the expert of row r; rounded once to dy's dtype
    dW_e += dy_e^T @ x_e       over the expert's rows in their order; added to a float32 gradient

One program owns a tile of dW_e and loops over the expert's rows, without atomics, so the same inputs add the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels import gemm
from qarl_kernels.blocks import dot, source_rows, split_columns
from qarl_kernels.groups import Groups
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch
from qarl_kernels.shapes import check_16_bit, check_tensor, output_features, output_rows
from qarl_kernels.tuning import Tile, lookup


@triton.jit
def _weight_grad_kernel(
    dy,  # (R, N) bf16 or fp16
    x,  # (R, K); (T, K) with `order`
    into,  # (experts * N, K) f32
    order,  # (R,) i32 or None
    starts,  # (experts + 1,) i32
    N,
    K,
    stride_dy,
    stride_x,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SLOTS: tl.constexpr,
):
    expert = tl.program_id(1)
    first = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    if first < end:
        num_k = tl.cdiv(K, BLOCK_K)
        n = tl.program_id(0) // num_k * BLOCK_N + tl.arange(0, BLOCK_N)
        k_first = tl.program_id(0) % num_k * BLOCK_K
        k = k_first + tl.arange(0, BLOCK_K)
        acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        source = source_rows(order, first + tl.arange(0, BLOCK_R), end, SLOTS)
        for start in range(first, end, BLOCK_R):
            rows = start + tl.arange(0, BLOCK_R)
            live = (rows < end)[:, None]
            a = tl.load(
                dy + rows.to(tl.int64)[:, None] * stride_dy + n[None, :], mask=live & (n < N)[None, :], other=0.0
            )
            b = tl.load(
                x + source.to(tl.int64)[:, None] * stride_x + k[None, :], mask=live & (k < K)[None, :], other=0.0
            )
            # One step ahead: rows whose numbers are loaded in the same step are not prefetched for the product.
            source = source_rows(order, rows + BLOCK_R, end, SLOTS)
            acc = dot(a.T, b, acc)
        # Half of the tile at a time: all of the old gradient would take as many registers as the sum, and the program
        # would be alone on its multiprocessor.
        HALF: tl.constexpr = BLOCK_K // 2
        left, right = split_columns(acc)
        row, k = (expert.to(tl.int64) * N + n)[:, None] * K, k_first + tl.arange(0, HALF)
        _add(into + row + k[None, :], left, (n < N)[:, None] & (k < K)[None, :])
        k += HALF
        _add(into + row + k[None, :], right, (n < N)[:, None] & (k < K)[None, :])


@triton.jit
def _add(at, value, keep):
    tl.store(at, tl.load(at, mask=keep, other=0.0) + value, mask=keep)


def grouped_input_grad(dy: Tensor, weight: Tensor, groups: Groups, tile: Tile | None = None) -> Tensor:
    """dx = dy @ W of each row's expert.

    Args:
        dy: (R, N) bf16 or fp16, in sorted order; last dimension contiguous, arbitrary row stride.
        weight: (E * N, K) of dy's dtype.
        tile: For tests and tuning. Default: the tuned one.

    Returns:
        (R, K) of dy's dtype. If the input was gathered, `combine.sum_over_slots` adds up its tokens' rows.

    Raises:
        ValueError: Shapes or dtypes do not agree.
    """
    _check("grouped_input_grad", dy, weight)
    m, n = output_rows(dy, groups, False), output_features(len(weight), groups)
    if dy.shape[1] != n:
        raise ValueError(f"dy has {dy.shape[1]} features and an expert's weight {n}; they must agree")
    k = weight.shape[1]
    out = torch.empty(m, k, dtype=dy.dtype, device=dy.device)
    tile = tile or lookup("input_grad", n, k, m, dy, groups=groups)
    gemm.run(dy, weight, None, None, None, out, tile, groups, transposed=True)
    return out


def grouped_weight_grad(
    dy: Tensor, x: Tensor, groups: Groups, gathered: bool, into: Tensor, tile: Tile | None = None
) -> None:
    """Add dy_e^T @ x_e of each expert to its part of `into`. Parts of experts without rows are not touched.

    Args:
        dy: (R, N) bf16 or fp16, in sorted order.
        x: Of dy's dtype, (T, K) if gathered, else (R, K). Last dimension of both contiguous, arbitrary row stride.
        into: float32 (E * N, K), contiguous.
        tile: block_m output features, block_n input features, block_k rows at a time. Default: the tuned one.

    Raises:
        ValueError: Shapes or dtypes do not agree.
    """
    n, k = dy.shape[1], x.shape[1]
    _check("grouped_weight_grad", x, dy)
    output_rows(x, groups, gathered), output_rows(dy, groups, False)
    shape = groups.experts * n, k
    check_tensor("grouped_weight_grad: into", into, (torch.float32,), shape, "pass one gradient of all experts")
    if not (gemm.loads_vectors(dy) and gemm.loads_vectors(x)):
        tile = gemm.POINTERS
    tile = tile or lookup("weight_grad", n, k, groups.rows, x, groups=groups, gathered=gathered)
    launch(
        _weight_grad_kernel,
        (cdiv(n, tile.block_m) * cdiv(k, tile.block_n), groups.experts),
        num_warps=tile.warps,
        num_stages=tile.stages,
        dy=dy,
        x=x,
        into=into,
        order=groups.order if gathered else None,
        starts=groups.starts,
        N=n,
        K=k,
        stride_dy=dy.stride(0),
        stride_x=x.stride(0),
        BLOCK_N=tile.block_m,
        BLOCK_K=tile.block_n,
        BLOCK_R=tile.block_k,
        SLOTS=groups.slots,
    )


def _check(name: str, x: Tensor, other: Tensor) -> None:
    """Raise ValueError unless both are of one 16-bit dtype with contiguous rows."""
    check_16_bit(name, x, other)
    if x.stride(1) != 1 or other.stride(1) != 1:
        raise ValueError(f"{name}: rows of both operands must be contiguous; call .contiguous()")
