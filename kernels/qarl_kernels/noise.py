"""Exponential noise for drawing tokens: a row's values depend on its own seed and counter only.

argmax(p / q) with q ~ Exp(1) draws from p. The noise is counter-based (Philox 4x32-10, Salmon et al. 2011), so that a
whole batch of rows with seeds of their own is filled at once, where a generator a row takes a launch a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch

BLOCK = 1024  # draws of four values, of one program
# Uniforms from 32 random bits, inside (0, 1): the noise is neither infinite nor 0.
STEP = tl.constexpr(2.0**-32)
SMALLEST = tl.constexpr(2.0**-33)
LARGEST = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _noise(bits):
    uniform = bits.to(tl.uint32, bitcast=True).to(tl.float32) * STEP + SMALLEST
    return -tl.log(tl.minimum(uniform, LARGEST))


@triton.jit(do_not_specialize=["seeds", "counters"])  # rows of one tensor: the second is aligned as their number is
def _exponential(out, seeds, counters, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    draw = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counter = tl.load(counters + row).to(tl.uint32)
    zero = draw * 0
    first, second, third, fourth = tl.philox(tl.load(seeds + row), draw, zero + counter, zero, zero)
    column = draw * 4
    start = out + row * stride
    tl.store(start + column, _noise(first), column < columns)
    tl.store(start + column + 1, _noise(second), column + 1 < columns)
    tl.store(start + column + 2, _noise(third), column + 2 < columns)
    tl.store(start + column + 3, _noise(fourth), column + 3 < columns)


def exponential_(out: Tensor, seeds: Tensor, counters: Tensor) -> Tensor:
    """Fill `out` with exponential noise of rate 1, all values above 0 and finite, and return it.

    out: (R, C) float32, rows contiguous. seeds: (R,) int64. counters: (R,) int64, below 2^32: how many draws of the
    row's stream went before. On a GPU, or anywhere in Triton's interpreter.
    """
    rows, columns = out.shape
    assert out.dtype == torch.float32 and out.stride(1) == 1, (out.dtype, out.stride())
    assert seeds.shape == counters.shape == (rows,), (seeds.shape, counters.shape)
    grid = (rows, cdiv(columns, 4 * BLOCK))
    launch(
        _exponential, grid, out=out, seeds=seeds, counters=counters, columns=columns, stride=out.stride(0), BLOCK=BLOCK
    )
    return out


def exponential_reference(seeds: Tensor, counters: Tensor, columns: int) -> Tensor:
    """What `exponential_` fills, in plain torch: float32 (R, columns)."""
    draws = torch.arange(-(-columns // 4), device=seeds.device)[None]
    zero = torch.zeros(len(seeds), draws.shape[1], dtype=torch.int64, device=seeds.device)
    state = [zero + draws, zero + counters[:, None], zero, zero]
    mask = 0xFFFFFFFF
    keys = [(seeds & mask)[:, None], ((seeds >> 32) & mask)[:, None]]
    for _ in range(10):
        high0, low0 = _multiply(state[0], 0xD2511F53)
        high2, low2 = _multiply(state[2], 0xCD9E8D57)
        state = [high2 ^ state[1] ^ keys[0], low2, high0 ^ state[3] ^ keys[1], low0]
        keys = [(keys[0] + 0x9E3779B9) & mask, (keys[1] + 0xBB67AE85) & mask]
    bits = torch.stack(state, -1).flatten(1)[:, :columns]
    uniform = bits.float() * STEP.value + SMALLEST.value
    return -uniform.clamp(max=LARGEST.value).log()


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of 32-bit values held in int64."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b  # below 2^48: a b = upper 2^16 + lower
    total = upper + (lower >> 16)
    return total >> 16, ((total & 0xFFFF) << 16) | (lower & 0xFFFF)
