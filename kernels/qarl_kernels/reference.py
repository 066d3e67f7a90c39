"""The low-bit products in plain torch: the CPU path, and the reference of every kernel.

Operands are unpacked: integer or FP8 codes as float32 tensors of the same values. That is exact, and the products run
on the FP32 units that every CPU has (CPUs without AMX or VNNI emulate bf16 and int8 products, 4 to 30 times slower).
On a CPU a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_kernels import invariant
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8

# 127 * 128 * 1024 < 2**24: partial sums of this many int8 products are integers that float32 holds exactly, so the
# FP32 units compute the int32 accumulation without error, in any order.
INT8_EXACT_K = 1024
FP8_BLOCK = 128  # rows and columns of a block with one scale
INT4_EXACT_K = 16_384  # 127 * 8 * 16,384 < 2**24


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (M, K) times weight (N, K), all float32. On a CPU a row's bits do not depend on the other rows."""
    return invariant.matmul(x, weight) if x.device.type == "cpu" else x @ weight.t()


def epilogue(acc: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return acc (M, N) float32 plus bias (N,), rounded once to `dtype`."""
    return (acc if bias is None else acc + bias.float()).to(dtype)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x @ weight^T + bias: operands of x's dtype, FP32 accumulation, one rounding to x's dtype.

    x: (M, K) bf16/fp16/fp32; weight: (N, K), values of x's dtype held in float32 on the CPU, in x's dtype on a GPU;
    bias: (N,) or None. Serves unquantized layers, and W4A16 with weight = (codes - zero) * scale rounded to x's dtype.
    """
    if x.device.type == "cpu":
        return epilogue(invariant.matmul(x.float(), weight), bias, x.dtype)
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def w8a8(x: Tensor, codes: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = ((qx @ codes^T in int32) * s_w) * s_x + bias, qx int8 per token, dynamic.

    x: (M, K) bf16/fp16/fp32; codes: (N, K) float32 holding int8 values; weight_scale: (N, 1). Returns (M, N) of
    x's dtype. The int32 accumulation is exact.
    """
    qx, scale = quantize_activation_int8(x)
    qx = qx.float()
    acc = torch.zeros(x.shape[0], codes.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, codes.shape[1], INT8_EXACT_K):
        stop = start + INT8_EXACT_K
        acc += (qx[:, start:stop] @ codes[:, start:stop].t()).to(torch.int32)
    return epilogue(acc.float() * weight_scale.float().t() * scale, bias, x.dtype)


def fp8(x: Tensor, codes: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = ((qx @ codes^T in fp32) * s_w) * s_x + bias, qx float8_e4m3fn per token, dynamic.

    x: (M, K) bf16/fp16/fp32; codes: (N, K) float32 holding e4m3 values; weight_scale: (N, 1). Returns (M, N) of
    x's dtype.
    """
    qx, scale = quantize_activation_fp8(x)
    return epilogue(matmul(qx.float(), codes) * weight_scale.float().t() * scale, bias, x.dtype)


def fp8_block(x: Tensor, codes: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = sum over blocks of 128 features of (qx_b @ codes_b^T in fp32) * (s_x,b * s_w,b) + bias.

    qx is float8_e4m3fn per token and block, dynamic. x: (M, K) bf16/fp16/fp32; codes: (N, K) float32 holding e4m3
    values; weight_scale: (ceil(N / 128), ceil(K / 128)). Returns (M, N) of x's dtype; blocks are added in order.
    """
    n, k = codes.shape
    weight_scale = weight_scale.float().repeat_interleave(FP8_BLOCK, dim=0)[:n]
    acc = torch.zeros(x.shape[0], n, device=x.device)
    for block, start in enumerate(range(0, k, FP8_BLOCK)):
        stop = start + FP8_BLOCK
        qx, scale = quantize_activation_fp8(x[:, start:stop])
        acc += matmul(qx.float(), codes[:, start:stop].contiguous()) * (scale * weight_scale[:, block])
    return epilogue(acc, bias, x.dtype)


def w4a8(x: Tensor, codes: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = sum over groups of (qx_g @ codes_g^T) * s_w,g, in group order in fp32, times s_x; qx int8 per token.

    x: (M, K) bf16/fp16/fp32; codes: (N, K) float32 holding int4 values; weight_scale: (N, K / group). Returns (M, N)
    of x's dtype. A group's product is exact up to INT4_EXACT_K features (longer ones are summed in parts of that size,
    in order), so only the ordered sum over groups rounds.
    """
    qx, scale = quantize_activation_int8(x)
    qx = qx.float()
    groups = weight_scale.shape[1]
    size = codes.shape[1] // groups
    weight_scale = weight_scale.float()
    acc = torch.zeros(x.shape[0], codes.shape[0], device=x.device)
    for g in range(groups):
        first, last = g * size, (g + 1) * size
        for start in range(first, last, INT4_EXACT_K):
            stop = min(start + INT4_EXACT_K, last)
            acc += (qx[:, start:stop] @ codes[:, start:stop].t()).mul_(weight_scale[:, g])
    return epilogue(acc * scale, bias, x.dtype)
