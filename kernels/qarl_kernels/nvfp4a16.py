"""y = (x @ (codes * scale)^T) / global scale: NVFP4 weights, 16-bit activations, FP32 sums; dense or per expert.

There are three ways to the same bits, with the kernels and the tiled form of `qarl_kernels.w4a16`. Plane j of a tile
(nibble j of its words) holds 16 adjacent features, which are a group with one scale. The `dequantized` way first
computes the matrix codes * scale. Untuned shapes use the default tiles of w4a16.

A weight is multiplied as code * scale, which 16 bits hold exactly, so nothing is rounded before the tensor core. The
FP32 sum is multiplied by fl(1 / global scale), bias is added, and the result is rounded once. K is never split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_kernels import gemm, tuning
from qarl_kernels.dequantize import check_stored
from qarl_kernels.groups import Groups
from qarl_kernels.nvfp4_weights import GROUP, dequantize_nvfp4
from qarl_kernels.shapes import output_features, output_rows
from qarl_kernels.tile import COLUMNS, ROWS, tile_int4, untile_int4
from qarl_kernels.tiled_product import tiled_product
from qarl_kernels.tuning import Tile


@torch.no_grad()
def tile_nvfp4(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Rearrange a weight into the order in which the fused kernels read it.

    Args:
        packed: uint8 [N, K / 2], contiguous, as stored.
        scale: float8_e4m3fn [N, K / 16], contiguous, as stored.

    Returns:
        tiled: int32 [ceil(N / 16), ceil(K / 128), 16, 16], see `qarl_kernels.tile`.
        scales: int32 [2 * ceil(K / 128), 16 * ceil(N / 16)]: byte i of entry [h, n] is the scale of row n, features
            64 h + 16 i to 64 h + 16 i + 15; zero beyond N and K.

    Raises:
        ValueError: dtypes or shapes do not fit each other.
    """
    n, groups = scale.shape
    check_stored("weight_packed", packed, (torch.uint8,), (n, 8 * groups))
    check_stored("weight_scale", scale, (torch.float8_e4m3fn,), (n, groups))
    missing = 0, -groups % (COLUMNS // 16), 0, -n % ROWS
    scales = torch.nn.functional.pad(scale.view(torch.uint8), missing).view(torch.int32).t().contiguous()
    return tile_int4(packed.view(torch.int32), 16 * groups), scales


def untile_nvfp4(tiled: Tensor, out_features: int, in_features: int) -> Tensor:
    """Undo `tile_nvfp4`: return `weight_packed`, uint8 [N, K / 2]."""
    return untile_int4(tiled, out_features, in_features).view(torch.uint8)


def nvfp4a16(
    x: Tensor,
    packed: Tensor | None,
    scale: Tensor,
    global_scale: Tensor,
    tiled: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    groups: Groups | None = None,
    gathered: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """y = (x @ (codes * scale)^T) / global_scale + bias, dense or per expert; all experts share the global scale.

    Args:
        x: (M, K) bf16 or fp16; with groups as in `gemm.dense`.
        packed: (N, K / 2) uint8, as compressed-tensors stores it. None: made from tiled if the product needs it.
        scale: (N, K / 16) float8_e4m3fn.
        global_scale: (1,) float32.
        tiled, scales: The same weight as `tile_nvfp4` arranges it.
        bias, out_dtype, groups, gathered, tile: As in `gemm.dense`. With groups the weight's tensors are those of
            all experts, concatenated, and N counts one expert.

    Returns:
        (M, N) of out_dtype; with groups in sorted order.
    """
    m, k, n = output_rows(x, groups, gathered), x.shape[1], output_features(len(scale), groups)
    if scale.shape[1] * GROUP != k:
        raise ValueError(f"x has {k} features and the weight {scale.shape[1] * GROUP}; they must agree")
    tile = tile or tuning.lookup("nvfp4a16", n, k, m, x, groups=groups, gathered=gathered)
    dtype = out_dtype or x.dtype
    if tile.way != "dequantized":
        return tiled_product(x, tiled, scales, n, bias, dtype, tile, groups, gathered, global_scale=global_scale)
    packed = untile_nvfp4(tiled, len(scale), k) if packed is None else packed
    weight = dequantize_nvfp4(packed, scale, None, x.dtype)
    ones = torch.ones(len(x), 1, dtype=torch.float32, device=x.device)
    divided = global_scale.reciprocal().expand(len(weight)).contiguous()
    # Not by the library, whose products have no scales.
    tile = tuning.lookup("dense", n, k, m, x, library=False, groups=groups, gathered=gathered)
    return gemm.multiply("dense", x, weight, ones, divided, bias, dtype, groups, gathered, tile)
