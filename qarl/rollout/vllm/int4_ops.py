"""Products of int4 weights that keep one form of the weight alone, as operators that torch.compile does not enter.

`qarl_kernels.ops` takes a weight as it is published, next to the form that its kernel reads; a learner holds both. A
sampler holds the second only. Arithmetic and bits are the same.
"""

from __future__ import annotations

from qarl_kernels import reference
from torch import Tensor
from torch.library import custom_op


@custom_op("qarl::w4a16_tiled", mutates_args=())
def w4a16_tiled(
    x: Tensor, tiled: Tensor, meta: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None
) -> Tensor:
    """y = x @ W^T + bias, W = (codes - zero point) * scale rounded to x's dtype.

    x: (M, K) bf16 or fp16; tiled, meta: the weight from `qarl_kernels.tile` (`meta_w4a16`); scale: (N, groups) of x's
    dtype; zero_point: int32 (ceil(N / 8), groups) or None; bias: (N,). Returns (M, N) of x's dtype.
    """
    from qarl_kernels import dequantize, gemm, tile, tuning, w4a16

    x, (m, k), n = x.contiguous(), x.shape, scale.shape[0]
    way = tuning.lookup("w4a16", n, k, m, x)
    if way.way == "dequantized":  # many rows: the codes are put back in order first, a tenth of what follows
        packed = tile.untile_int4(tiled, n, k)
        return gemm.dense(x, dequantize.dequantize_int4(packed, scale, zero_point, k, x.dtype), bias)
    return w4a16.fused(x, tiled, meta, n, bias, x.dtype, way)


@custom_op("qarl::w4a8_tiled", mutates_args=())
def w4a8_tiled(x: Tensor, tiled: Tensor, meta: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`reference.w4a8` on a tiled weight; x is quantized to int8 per token.

    x: (M, K) bf16 or fp16; tiled, meta: the weight from `qarl_kernels.tile` (`meta_w4a8`); scale: (N, groups);
    bias: (N,). Returns (M, N) of x's dtype.
    """
    from qarl_kernels import quantize, w4a8

    (n, groups), k = scale.shape, x.shape[1]
    return w4a8.w4a8(*quantize.activation_int8(x.contiguous()), tiled, meta, k, n, bias, x.dtype, groups == 1)


@custom_op("qarl::w4a8_codes", mutates_args=())
def w4a8_codes(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`reference.w4a8`, the CPU's. x: (M, K); codes: (N, K) float32 holding int4 values; scale: (N, groups)."""
    return reference.w4a8(x, codes, scale, bias)


@w4a16_tiled.register_fake
def _(x, tiled, meta, scale, zero_point, bias):
    return x.new_empty(x.shape[0], scale.shape[0])


@w4a8_tiled.register_fake
def _(x, tiled, meta, scale, bias):
    return x.new_empty(x.shape[0], scale.shape[0])


@w4a8_codes.register_fake
def _(x, codes, scale, bias):
    return x.new_empty(x.shape[0], scale.shape[0])
