"""Quantization of FP32 master weights to NVFP4, bit-identical to compressed-tensors.

A weight is code * scale / global scale: e2m1 codes (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), an e4m3 scale per
16 input features, a float32 global scale, which is a divisor. The oracle is compressed-tensors 0.17 on the CPU:
`generate_gparam`, `calculate_qparams` with the preset NVFP4A16 and that global scale, `NVFP4PackedCompressor`. Rules:

- global scale = fl(fl(1 / absmax of the tensor) * 448 * 6), so that the largest scale is 448. If that is infinite
  (absmax below 7.9e-36, a zero tensor) it is 1.
- scale = e4m3(fl(fl(absmax of the group / 6) * global scale)), clamped to 448; subnormals down to 2^-9 are kept. A
  scale that rounds to 0 (of a zero group, or if absmax is at most 2^-10 / 448 of the tensor's) becomes 0.125, by which
  all weights of the group round to 0 or -0.
- code = e2m1(fl(weight / fl(scale / global scale))), the nearest, ties to the even mantissa: 0.25 -> 0, 0.75 -> 1,
  1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4. A negative weight that rounds to zero is -0 (code 8); -0.0 is +0.

Engines multiply layers with one input as one weight with one global scale: vLLM takes the largest divisor it finds and
warns, which scales the other weights wrongly. So such layers are quantized with the global scale of the largest absmax
among them, as in llm-compressor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from qarl_kernels.nvfp4 import E2M1, GROUP
from torch import Tensor

E2M1_MAX = E2M1[-1]
_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = torch.finfo(_E4M3).max
_ZERO_SCALE = 0.125  # replaces a scale of 0; e4m3's eps

# The code of a magnitude is the number of thresholds below it. For ties that round up to an even mantissa (0.75, 1.75,
# 3.5), the threshold is the next smaller float32.
_EDGES = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)


@torch.no_grad()
def absmax_of(weight: Tensor) -> Tensor:
    """Return the maximum magnitude of a master, float32 []; NaN or infinite if a value is."""
    low, high = torch.aminmax(weight)
    return torch.maximum(high, -low)


@torch.no_grad()
def global_scale_of(absmax: Iterable[Tensor]) -> Tensor:
    """`weight_global_scale` float32 [1], a divisor, of weights that are multiplied as one, from their `absmax_of`."""
    largest = torch.stack(list(absmax)).amax().clamp(min=torch.finfo(torch.float32).tiny)
    scale = largest.reciprocal() * (_E4M3_MAX * E2M1_MAX)  # as torch divides a number by a tensor
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0).reshape(1)


@torch.no_grad()
def quantize_nvfp4(weight: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a finite master weight float32 [N, K], K a multiple of 16, with a global scale float32 [1].

    Returns weight_packed uint8 [N, K / 2], two codes per byte, the first in the low nibble, and weight_scale
    float8_e4m3fn [N, K / 16].
    """
    n, k = weight.shape
    assert weight.dtype == torch.float32 and k % GROUP == 0, (
        f"need a float32 matrix of groups of 16, not {weight.shape}"
    )
    groups = weight.reshape(n, k // GROUP, GROUP)
    absmax = torch.maximum(groups.amax(-1), -groups.amin(-1))
    exact = absmax / torch.full_like(absmax, E2M1_MAX) * global_scale  # a tensor: CUDA divides by a number inexactly
    scale = exact.clamp_(max=_E4M3_MAX).to(_E4M3)
    wide = scale.float()
    zero = wide == 0
    wide[zero] = _ZERO_SCALE
    return pack_e2m1((groups / (wide / global_scale)[..., None]).view(n, k)), wide.to(_E4M3)


def pack_e2m1(values: Tensor) -> Tensor:
    """Round to e2m1 and pack: float32 [N, K], K even -> uint8 [N, K / 2], the first of two in the low nibble."""
    edges = torch.tensor(_EDGES, dtype=torch.float32, device=values.device)
    codes = torch.bucketize(values.abs().contiguous(), edges, out_int32=True).to(torch.uint8)
    codes |= (values < 0).to(torch.uint8) << 3
    pairs = codes.view(codes.shape[0], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)
