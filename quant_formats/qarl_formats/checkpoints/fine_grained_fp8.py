"""Hugging Face's fine-grained FP8 (`quant_method: fp8`), the format of DeepSeek-V3 and of Qwen's FP8 checkpoints.

`weight` float8_e4m3fn [N, K] and `weight_scale_inv` [ceil(N / 128), ceil(K / 128)]. Despite its name the scale is the
factor that codes are multiplied with. These are the tensors of scheme fp8_block under other names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from qarl_formats.checkpoints.base import FLOATS, CheckpointFormat, Stored, StoredSpecs, setting, shown
from qarl_formats.registry import make_scheme
from qarl_formats.scheme import Scheme, Shape, Tensors

if TYPE_CHECKING:
    from qarl_formats.weight import LowBitWeight

_BLOCKS = [128, 128]


class FineGrainedFP8(CheckpointFormat):
    method = "fp8"
    mark = scale = "weight_scale_inv"
    scheme: Scheme

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("weight_block_size") != _BLOCKS:
            size = shown(config.get("weight_block_size"))
            raise ValueError(f"weight_block_size {size} cannot be read; only {_BLOCKS} can")
        setting(config, "activation_scheme", ("dynamic",), "dynamic")
        setting(config, "fmt", ("e4m3", None))
        self.scheme = make_scheme("fp8_block")

    def specs(self, module: str, shape: Shape, found: Collection[str]) -> StoredSpecs:
        specs = self.scheme.tensor_specs(*shape)
        scales = Stored(specs["weight_scale"].shape, (*FLOATS, "float8_e8m0fnu"))
        return {"weight": Stored(shape, ("float8_e4m3fn",)), self.scale: scales}

    def read(self, module: str, tensors: Tensors, shape: Shape) -> LowBitWeight:
        import torch

        from qarl_formats.weight import LowBitWeight

        scale = tensors[self.scale]
        if scale.dtype not in (torch.bfloat16, torch.float16, torch.float32):  # e8m0: powers of two
            scale = scale.float()
        scheme = make_scheme("fp8_block", scale_dtype=str(scale.dtype).removeprefix("torch."))
        return LowBitWeight(scheme, {"weight": tensors["weight"], "weight_scale": scale}, shape)
