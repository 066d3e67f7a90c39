"""What the kernels share that read a tiled 4-bit weight (`qarl_kernels.tile`): pieces of them, and how they start.

A `wide` kernel computes y^T = W x^T, the weight as the register operand of warpgroup products. A multiprocessor's
tensor cores rest while a program turns words into weights, unless another program on it keeps them busy, so what counts
is that two or three fit: few registers, few stages. Two choices of a tile serve that, and change no bit:

- tma: x comes, and y goes, through the tensor memory accelerator. By pointers, the addresses and copies of x take a
  third of the loop's instructions and 40 registers.
- split: a block's product in two, of 64 features each; the second half's weight is made while the first one runs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import COMPILED, dot, source_rows
from qarl_kernels.casts import narrow
from qarl_kernels.direct import Descriptor
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch, supports_tma
from qarl_kernels.moe.dispatch import rows_in_order
from qarl_kernels.moe.groups import Groups, kernel_arguments, output_rows, row_tiles
from qarl_kernels.output import output
from qarl_kernels.tuning import Tile

BLOCK = 128  # input features of one tile of words


@triton.jit
def x_plane(x, live, k, K, EVEN: tl.constexpr):
    """x^T of 16 features (16, BLOCK_M); zeros for rows that are not live and features beyond K."""
    if EVEN:
        tile = tl.load(x, mask=live, other=0.0)
    else:
        tile = tl.load(x, mask=live & (k < K), other=0.0)
    return tile.T


@triton.jit
def x_planes(x, live, k, K, EVEN: tl.constexpr):
    """`x_plane` of the 128 features of a block, eight times 16. x: pointers to the first ones; k: which those are."""
    x0 = x_plane(x, live, k, K, EVEN)
    x1 = x_plane(x + 16, live, k + 16, K, EVEN)
    x2 = x_plane(x + 32, live, k + 32, K, EVEN)
    x3 = x_plane(x + 48, live, k + 48, K, EVEN)
    x4 = x_plane(x + 64, live, k + 64, K, EVEN)
    x5 = x_plane(x + 80, live, k + 80, K, EVEN)
    x6 = x_plane(x + 96, live, k + 96, K, EVEN)
    x7 = x_plane(x + 112, live, k + 112, K, EVEN)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def eight_products(acc, planes, xs):
    """acc (BLOCK_N, BLOCK_M) and, one after the other, the products of a block's planes. xs: see `x_planes`."""
    p0, p1, p2, p3, p4, p5, p6, p7 = planes
    x0, x1, x2, x3, x4, x5, x6, x7 = xs
    acc = dot(p0, x0, acc)
    acc = dot(p1, x1, acc)
    acc = dot(p2, x2, acc)
    acc = dot(p3, x3, acc)
    acc = dot(p4, x4, acc)
    acc = dot(p5, x5, acc)
    acc = dot(p6, x6, acc)
    acc = dot(p7, x7, acc)
    return acc


@triton.jit
def x_rows(x, order, m, end, stride, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, TMA: tl.constexpr):
    """What `x_tile` loads rows [m, end) of x with: x itself if it is a descriptor, else pointers (BLOCK_M,) to rows."""
    if TMA:
        rows = x
    else:
        rows = x + source_rows(order, m + tl.arange(0, BLOCK_M), end, SLOTS).to(tl.int64) * stride
    return rows


@triton.jit
def x_tile(x, m, k, K, SIZE: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr):
    """Features [k, k + SIZE) of a tile of rows of x, zeros beyond K. Rows that do not matter are anything finite.

    x: a tensor descriptor, whose rows from m on are meant (TMA), or pointers to the rows (BLOCK_M,).
    """
    if TMA:
        tile = x.load([m, k])
    else:
        at = k + tl.arange(0, SIZE)[None, :]
        if EVEN:
            tile = tl.load(x[:, None] + at)
        else:
            tile = tl.load(x[:, None] + at, mask=at < K, other=0.0)
    return tile


@triton.jit
def four_planes(p0, p1, p2, p3):
    """Planes of 16 features (BLOCK_N, 16) side by side, (BLOCK_N, 64)."""
    q = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # (BLOCK_N, 16, 2, 2): the last axes are the bits of the number
    return q.permute(0, 2, 3, 1).reshape(p0.shape[0], 64)


@triton.jit
def eight_planes(p0, p1, p2, p3, p4, p5, p6, p7):
    """As `four_planes`, (BLOCK_N, 128)."""
    q = tl.join(tl.join(tl.join(p0, p4), tl.join(p2, p6)), tl.join(tl.join(p1, p5), tl.join(p3, p7)))
    return q.permute(0, 2, 3, 4, 1).reshape(p0.shape[0], 128)


@triton.jit
def finished(acc):
    """acc, the sum of a warpgroup product in a loop, after the product is done.

    A use of the sum inside the loop makes Triton wait for the product. Without it Triton 3.6 leaves products with a
    register operand in flight while the next step writes those registers (its issue 9433): wrong sums, seen on H100.
    """
    if COMPILED:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1)
    return acc


@triton.jit
def wide_product(acc, planes, x, m, k, K, EVEN: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr):
    """acc (BLOCK_N, BLOCK_M) and a block's product by warpgroups. planes: eight (BLOCK_N, 16); x, m: see `x_tile`."""
    p0, p1, p2, p3, p4, p5, p6, p7 = planes
    if SPLIT:
        x0 = x_tile(x, m, k, K, 64, EVEN, TMA)
        x1 = x_tile(x, m, k + 64, K, 64, EVEN, TMA)
        acc = dot(four_planes(p0, p1, p2, p3), x0.T, acc)
        acc = finished(dot(four_planes(p4, p5, p6, p7), x1.T, acc))
    else:
        xt = x_tile(x, m, k, K, 128, EVEN, TMA)
        acc = finished(dot(eight_planes(p0, p1, p2, p3, p4, p5, p6, p7), xt.T, acc))
    return acc


@triton.jit
def store(acc, out, bias, m, n, end, N, stride_om, TMA_OUT: tl.constexpr):
    """Store y^T (BLOCK_N, BLOCK_M) fp32, plus bias, rounded once, to rows [m, end) and columns [n, N) of out.

    out: a tensor descriptor of blocks (BLOCK_M, BLOCK_N) (TMA_OUT), or a pointer and `stride_om` between rows.
    """
    rn = n + tl.arange(0, acc.shape[0])
    if bias is not None:
        acc += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[:, None]
    if TMA_OUT:
        out.store([m, n], narrow(acc.T, out.dtype))
    else:
        rm = m + tl.arange(0, acc.shape[1])
        at = out + rm.to(tl.int64)[None, :] * stride_om + rn[:, None]
        tl.store(at, narrow(acc, out.dtype.element_ty), mask=(rm < end)[None, :] & (rn < N)[:, None])


def run_tiled(
    kernel: Any,
    x: Tensor,
    tiled: Tensor,
    n: int,
    bias: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
    groups: Groups | None,
    gathered: bool,
    wide: bool,
    **own: Any,
) -> Tensor:
    """Launch a kernel that multiplies x (M, K), or (T, K) if gathered, by a tiled weight of n features per expert.

    wide: the kernel is a 16-bit `wide` one, which takes x and out as its tile says. own: arguments that only this
    kernel has. Returns `out`, (M, n).
    """
    m, k = output_rows(x, groups, gathered, bias), x.shape[1]
    experts = 1 if groups is None else groups.experts
    if tiled.shape[:2] != (cdiv(experts * n, 16), cdiv(k, BLOCK)):
        raise ValueError(f"x has {k} features, but a tiled weight {list(tiled.shape)} is not {experts} x {n} x {k}")
    if x.stride(1) != 1:
        x = x.contiguous()
    out = output(out, m, n, out_dtype, x.device)
    tma = tma_out = False
    if wide:
        tma = tile.tma and supports_tma(x)
        if tma and gathered:  # the accelerator reads adjacent rows: put the tokens' rows in sorted order first
            assert groups is not None
            x, gathered = rows_in_order(x, groups), False
        # A float32 tile takes too much shared memory, and a tile of an expert's last rows would write the next one's.
        tma_out = tile.tma and groups is None and supports_tma(out) and out.element_size() == 2
        own |= {"TMA": tma, "TMA_OUT": tma_out, "SPLIT": tile.split}
    launch(
        kernel,
        (row_tiles(m, tile.block_m, groups) * cdiv(n, tile.block_n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        x=Descriptor(x, (tile.block_m, BLOCK // 2 if tile.split else BLOCK)) if tma else x,
        tiled=tiled,
        bias=bias,
        out=Descriptor(out, (tile.block_m, tile.block_n)) if tma_out else out,
        M=m,
        N=n,
        K=k,
        stride_xm=x.stride(0),
        stride_om=out.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        EVEN=k % BLOCK == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0,
        **own,
        **kernel_arguments(groups, gathered),
    )
    return out
