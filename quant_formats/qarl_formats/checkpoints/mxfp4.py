"""MXFP4 (`quant_method: mxfp4`), the layout of gpt-oss: e2m1 codes and a power of two per 32 inputs.

`*_blocks` uint8 [..., K / 32, 16], two codes per byte, the first in the low nibble, and `*_scales` uint8 [..., K / 32],
exponents with a bias of 127 (OCP Microscaling Formats 1.0, E8M0). No scheme has such scales, so weights are read as
dequantized values. This reads Linear layers in the format; qarl does not support the experts of gpt-oss itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from qarl_formats.checkpoints.base import CheckpointFormat, Stored, StoredSpecs, count_of
from qarl_formats.scheme import Shape, Tensors

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 32
_BIAS = 127


class MXFP4(CheckpointFormat):
    method = "mxfp4"
    mark, scale = "weight_blocks", "weight_scales"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """The configuration has nothing that changes the layout."""

    def specs(self, module: str, shape: Shape, found: Collection[str]) -> StoredSpecs:
        n, blocks = shape[0], count_of("input features", shape[1], _BLOCK)
        return {
            self.mark: Stored((n, blocks, _BLOCK // 2), ("uint8",)),
            self.scale: Stored((n, blocks), ("uint8", "float8_e8m0fnu")),
        }

    def read(self, module: str, tensors: Tensors, shape: Shape) -> Tensor:
        return dequantize_mxfp4(tensors[self.mark], tensors[self.scale])


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [..., K / 32, 16] and uint8 [..., K / 32] -> float32 [..., K]. A scale of 255 is NaN."""
    import torch
    from qarl_kernels.nvfp4 import e2m1_values

    values = e2m1_values(blocks.reshape(-1, _BLOCK // 2)).view(*scales.shape, _BLOCK)
    exponents = scales.view(torch.uint8).to(torch.int32)
    factor = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - _BIAS)
    return values.mul_(factor.masked_fill(exponents == 255, float("nan"))[..., None]).flatten(-2)
