"""GPTQ (`quant_method: gptq`) as AutoGPTQ and GPTQModel store it, of 2, 4 or 8 bits.

`qweight` int32 [K * bits / 32, N], `qzeros` int32 [groups, N * bits / 32], `scales` [groups, N], `g_idx` int32 [K]: the
group of each input. Weights are transposed: a word of qweight holds consecutive inputs, a word of qzeros consecutive
outputs. `checkpoint_format: gptq` (v1) stores zero points minus one, `gptq_v2` as they are.

With `desc_act` the inputs of a group are not adjacent. No scheme stores that, so only the values are read, unless the
groups are adjacent after all. Some files have biases of zeros that the model does not have; they are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from qarl_formats.checkpoints.base import (
    FLOATS,
    CheckpointFormat,
    Stored,
    StoredSpecs,
    count_of,
    group_size_of,
    int4_scheme,
    setting,
)
from qarl_formats.scheme import Shape, Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from qarl_formats.weight import LowBitWeight


class GPTQ(CheckpointFormat):
    method = "gptq"
    mark, scale = "qweight", "scales"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.bits: int = setting(config, "bits", (2, 4, 8))
        layout = setting(config, "checkpoint_format", ("gptq", "gptq_v2", "", None))
        self.less = 0 if layout == "gptq_v2" else 1  # subtracted from stored zero points
        self.symmetric: bool = setting(config, "sym", (True, False), True)
        self.reordered: bool = setting(config, "desc_act", (True, False), False)
        self.group_size = group_size_of(config)
        if self.bits == 4 and not (self.reordered and self.group_size):
            self.scheme = int4_scheme(self.group_size, self.symmetric)

    def specs(self, module: str, shape: Shape, found: Collection[str]) -> StoredSpecs:
        n, k = shape
        per_word, groups = 32 // self.bits, -(-k // (self.group_size or k))
        specs = {
            "qweight": Stored((count_of("input features", k, per_word), n), ("int32",)),
            "qzeros": Stored((groups, count_of("output features", n, per_word)), ("int32",)),
            "scales": Stored((groups, n), FLOATS),
        }
        if self.reordered or f"{module}.g_idx" in found:
            specs["g_idx"] = Stored((k,), ("int32", "int64"))
        if f"{module}.bias" in found:
            specs["bias"] = Stored((n,), FLOATS)
        return specs

    def read(self, module: str, tensors: Tensors, shape: Shape) -> LowBitWeight | Tensor:
        import torch

        from qarl_formats.checkpoints.int4 import OFFSET, as_int4, dequantized, unpack_words

        if "bias" in tensors and tensors["bias"].any():
            raise ValueError(f"{module}.bias is not zero, and config.json describes a layer without one")
        codes = unpack_words(tensors["qweight"].t().contiguous(), self.bits)
        zeros = (unpack_words(tensors["qzeros"], self.bits) + self.less).t()
        scales = tensors["scales"].t()
        columns = torch.arange(shape[1]) // (self.group_size or shape[1])
        groups = tensors["g_idx"].long() if "g_idx" in tensors else columns
        if groups.min() < 0 or groups.max() >= scales.shape[1]:
            raise ValueError(f"{module}.g_idx names a group that does not exist")
        stored = bool((zeros == OFFSET).all()) if self.symmetric else int(zeros.max()) < 2 * OFFSET
        whole = shape[1] % scales.shape[1] == 0
        if self.scheme is not None and stored and whole and torch.equal(groups, columns):
            return as_int4(codes, zeros, scales, shape, self.scheme)
        return dequantized(codes, zeros, scales, groups)
