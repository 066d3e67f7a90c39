"""y = x @ ((codes - zero) * scale)^T: int4 weights, 16-bit activations, FP32 accumulation; dense or grouped by expert.

There are three ways to the same bits; the tuning table picks one by the number of rows:

- `narrow` (decode): mma.sync on 16 weight rows per warp. Eight products of 16 input features follow each other, one
  per nibble of the words, so nothing is shuffled: a thread's words are its matrix fragment.
- `wide`: wgmma with the dequantized weight as the register operand and x from shared memory (y^T = W x^T).
- `dequantized`: convert the codes to 16-bit values once, then run `gemm.dense`.

The weight's value is rounded once, (code - zero) * scale, as in the reference, and K is never split: the tensor core
adds 16 products at a time, in order, whichever instruction runs it. mma.sync, wgmma with either operand order and
cuBLAS without split-K agree bit for bit (seen on H100, and tested), so the three ways are one function.

`narrow` and `wide` read the tiled form of a weight (`qarl_kernels.tile`); `qarl_kernels.tiled_product` has the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_kernels import gemm
from qarl_kernels.dequantize import dequantize_int4
from qarl_kernels.groups import Groups
from qarl_kernels.integers import cdiv
from qarl_kernels.shapes import output_features, output_rows
from qarl_kernels.tile import untile_int4
from qarl_kernels.tiled_product import tiled_product
from qarl_kernels.tuning import Tile, lookup


def w4a16(
    x: Tensor,
    packed: Tensor | None,
    scale: Tensor,
    zero_point: Tensor | None,
    tiled: Tensor | None,
    meta: Tensor | None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    groups: Groups | None = None,
    gathered: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """y = x @ ((codes - zero) * scale rounded to x's dtype)^T + bias, dense or per expert.

    Args:
        x: (M, K) bf16 or fp16; with groups as in `gemm.dense`.
        packed: (N, ceil(K / 8)) int32, as compressed-tensors stores it. May be None if tiled and meta are given.
        scale: (N, K / group).
        zero_point: (ceil(N / 8), K / group) int32, or None.
        tiled, meta: The same weight as `qarl_kernels.tile` arranges it. Without them every M is dequantized first.
        bias, out_dtype, groups, gathered, tile: As in `gemm.dense`. With groups the weight's tensors are those of
            all experts, concatenated, and N counts one expert.

    Returns:
        (M, N) of out_dtype; with groups in sorted order.
    """
    m, k, n = output_rows(x, groups, gathered), x.shape[1], output_features(len(scale), groups)
    if packed is not None and packed.shape[1] != cdiv(k, 8):
        raise ValueError(f"x has {k} features and the weight {packed.shape[1] * 8} packed ones; they must agree")
    tile = tile or lookup("w4a16", n, k, m, x, groups=groups, gathered=gathered)
    if tile.way == "dequantized" or tiled is None or meta is None:
        if packed is None:  # untiling takes a tenth of the time of what follows
            assert tiled is not None, "w4a16 needs the weight packed or tiled"
            packed = untile_int4(tiled, len(scale), k)
        weight = dequantize_int4(packed, scale, zero_point, k, x.dtype)
        return gemm.dense(x, weight, bias, out_dtype, groups, gathered)
    dtype = out_dtype or x.dtype
    return tiled_product(x, tiled, meta, n, bias, dtype, tile, groups, gathered, global_scale=None)
