"""fp8_block: float8_e4m3fn weights, a scale a block of 128 x 128; activations float8_e4m3fn per token and 128 features.

What DeepSeek-V3 was trained in, and what compressed-tensors calls FP8_BLOCK. Where 128 does not divide N or K the last
blocks are smaller, as the library has them; vLLM wants whole blocks of rows in all but the last of the layers it fuses.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from qarl_formats.registry import register
from qarl_formats.schemes.bytes import ByteActivations, CodesProduct, GroupedProduct, QuantizeInput, Reference

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from qarl_formats.quantize import QuantizedWeight

BLOCK = 128


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


@register
class FP8Block(ByteActivations):
    """y = sum over blocks of 128 features, in order, of (qx_b @ codes_b^T in fp32) * (s_x,b * s_w,b)."""

    name = "fp8_block"
    description = "float8_e4m3fn weights, a scale a 128 x 128 block; float8_e4m3fn activations, a scale a token and 128"
    weight_type = "float"
    activation = "fp8"
    input_codes = "fp8_group"
    capability = (8, 9)
    row_block = BLOCK
    file_format = "float-quantized"
    strategies = ("block",)
    tolerance = 0.3

    def num_groups(self, in_features: int) -> int:
        return _blocks(in_features)

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        return _blocks(out_features), _blocks(in_features)

    def weight_arguments(self) -> dict[str, Any]:
        return super().weight_arguments() | {"strategy": "block", "block_structure": [BLOCK, BLOCK]}

    def activation_arguments(self) -> dict[str, Any]:
        return {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": BLOCK,
            "dynamic": True,
        }

    def library_fault(self, out_features: int, in_features: int) -> str | None:
        # 0.17 takes the size of a block from the number of scales, and cuts activations into whole groups alone.
        whole = out_features <= BLOCK or (out_features % BLOCK == 0 and in_features > BLOCK)
        if whole and in_features % BLOCK == 0:
            return None
        return f"compressed-tensors does not dequantize [{out_features}, {in_features}] in blocks of {BLOCK}"

    @property
    def text(self) -> str:
        return (
            f"{self.name}: float8_e4m3fn weights with a scale per {BLOCK} x {BLOCK} block ({self.scale_dtype}); inputs "
            f"in fp8, per token and {BLOCK} features"
        )

    def _by_torch(self, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        from torch.nn.functional import pad

        from qarl_formats import rounding

        n, k = weight.shape
        rows, columns = self.scale_shape(n, k)
        whole = pad(weight, (0, columns * BLOCK - k, 0, rows * BLOCK - n))
        blocks = whole.view(rows, BLOCK, columns, BLOCK).transpose(1, 2).reshape(rows, columns, BLOCK * BLOCK)
        scaled, scale, bad = rounding.symmetric(blocks, rounding.FP8, scale_dtype)
        codes = rounding.e4m3(scaled).view(rows, columns, BLOCK, BLOCK).transpose(1, 2).reshape(whole.shape)
        return codes[:n, :k].contiguous(), scale.squeeze(-1), bad

    def _by_kernel(self, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        from qarl_kernels.quantize import quantize_fp8_block

        return quantize_fp8_block(weight, scale_dtype)

    def spread(self, scale: Tensor, shape: tuple[int, int]) -> Tensor:
        n, k = shape
        return scale.float().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype, kernels: bool = False) -> Tensor:
        if not kernels:
            return super().dequantize(weight, dtype)
        from qarl_kernels.dequantize import dequantize_fp8_block

        return dequantize_fp8_block(weight.tensors["weight"], weight.tensors["weight_scale"], dtype)

    def rounded_input(self, x: Tensor) -> Tensor:
        import torch

        return torch.cat([super(FP8Block, self).rounded_input(part) for part in x.split(BLOCK, -1)], -1)

    @classmethod
    def _reference(cls) -> Reference:
        from qarl_kernels import reference

        return reference.fp8_block

    @classmethod
    @cache
    def _kernels(cls) -> tuple[QuantizeInput, CodesProduct]:
        from qarl_kernels import fp8_block, quantize

        return quantize.activation_fp8_group, fp8_block.fp8_block

    @classmethod
    def _grouped_kernel(cls) -> GroupedProduct:
        from qarl_kernels.moe import fp8_block

        return fp8_block.grouped_fp8_block
