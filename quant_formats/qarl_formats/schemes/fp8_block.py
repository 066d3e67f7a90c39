"""fp8_block: float8_e4m3fn weights with a scale per block of 128 x 128; activations float8_e4m3fn, dynamic, with a
scale per token and 128 features.

The format that DeepSeek-V3 was trained in; compressed-tensors calls it FP8_BLOCK. If 128 does not divide N or K, the
last blocks are smaller, as in the library. In layers that vLLM fuses, only the last one may end in a partial block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qarl_formats.registry import register
from qarl_formats.scheme import Shape, Tensors
from qarl_formats.schemes.bytes import ByteActivations

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 128


@register
class FP8Block(ByteActivations):
    """y = sum over blocks of 128 features, in order, of (qx_b @ codes_b^T in fp32) * (s_x,b * s_w,b)."""

    name = "fp8_block"
    description = (
        "float8_e4m3fn weights, a scale per 128 x 128 block; float8_e4m3fn activations, a scale per token and "
        "128 features"
    )
    weight_type = "float"
    activation = "fp8"
    input_codes = "fp8_group"
    capability = (8, 9)
    row_block = BLOCK
    file_format = "float-quantized"
    strategies = ("block",)
    tolerance = 0.3

    def num_groups(self, in_features: int) -> int:
        return -(-in_features // BLOCK)

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
        # 0.17 infers the block size from the number of scales, and splits activations into whole groups only.
        whole = out_features <= BLOCK or (out_features % BLOCK == 0 and in_features > BLOCK)
        if whole and in_features % BLOCK == 0:
            return None
        return f"compressed-tensors does not dequantize [{out_features}, {in_features}] in blocks of {BLOCK}"

    def _by_torch(self, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        from qarl_formats import rounding

        scaled, scale, bad = rounding.symmetric(_blocks(weight), rounding.FP8, scale_dtype)
        return _from_blocks(rounding.e4m3(scaled), *weight.shape), scale.squeeze(-1), bad

    def preimage(self, tensors: Tensors, shape: Shape) -> tuple[Tensor, Tensor]:
        from qarl_formats import preimage, rounding

        blocks, scale = _blocks(tensors["weight"].float()), tensors["weight_scale"]
        master, exact = preimage.symmetric(blocks.flatten(0, 1), scale.flatten()[:, None], rounding.FP8)
        return _from_blocks(master.view(blocks.shape), *shape), (~exact).sum()

    def dequantize(self, tensors: Tensors, shape: Shape, dtype: torch.dtype, kernels: bool = False) -> Tensor:
        if kernels:
            return super().dequantize(tensors, shape, dtype, kernels)
        (n, k), codes, scale = shape, tensors["weight"], tensors["weight_scale"]
        wide = scale.float().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
        return (codes.float() * wide).to(dtype)

    def rounded_input(self, x: Tensor) -> Tensor:
        import torch

        return torch.cat([super(FP8Block, self).rounded_input(part) for part in x.split(BLOCK, -1)], -1)

    def _kernel(self) -> Callable[..., Tensor]:
        from qarl_kernels.fp8_block import fp8_block

        return fp8_block


def _blocks(weight: Tensor) -> Tensor:
    """[N, K], padded with zeros -> [ceil(N / 128), ceil(K / 128), 128 * 128]."""
    from torch.nn.functional import pad

    whole = pad(weight, (0, -weight.shape[1] % BLOCK, 0, -weight.shape[0] % BLOCK))
    return whole.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(2)


def _from_blocks(blocks: Tensor, n: int, k: int) -> Tensor:
    """Undo `_blocks`: [rows, columns, 128 * 128] -> [n, k], contiguous."""
    whole = blocks.unflatten(2, (BLOCK, BLOCK)).transpose(1, 2).flatten(2).flatten(0, 1)
    return whole[:n, :k].contiguous()
