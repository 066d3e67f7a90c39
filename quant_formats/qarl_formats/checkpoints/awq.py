"""AWQ (`quant_method: awq`) in the GEMM layout of AutoAWQ: int4 with a scale and a zero point per group.

`qweight` int32 [K, N / 8], `qzeros` int32 [groups, N / 8], `scales` [groups, N]. Weights are transposed: a word holds
eight output features, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.
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

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of output features in a word: the inverse of the order above


class AWQ(CheckpointFormat):
    method = "awq"
    mark, scale = "qweight", "scales"

    def __init__(self, config: Mapping[str, Any]) -> None:
        setting(config, "bits", (4,))
        setting(config, "version", ("gemm", "GEMM"), "gemm")
        setting(config, "zero_point", (True,), True)
        self.group_size = group_size_of(config)
        self.scheme = int4_scheme(self.group_size, symmetric=False)

    def specs(self, module: str, shape: Shape, found: Collection[str]) -> StoredSpecs:
        n, k = shape
        words, groups = count_of("output features", n, 8), count_of("input features", k, self.group_size or k)
        return {
            "qweight": Stored((k, words), ("int32",)),
            "qzeros": Stored((groups, words), ("int32",)),
            "scales": Stored((groups, n), FLOATS),
        }

    def read(self, module: str, tensors: Tensors, shape: Shape) -> LowBitWeight | Tensor:
        import torch

        from qarl_formats.checkpoints.int4 import as_int4, dequantized

        codes, zeros, scales = _unpacked(tensors["qweight"]), _unpacked(tensors["qzeros"]), tensors["scales"].t()
        if self.scheme is not None:
            return as_int4(codes, zeros, scales, shape, self.scheme)
        return dequantized(codes, zeros, scales, torch.arange(shape[1]) // (self.group_size or shape[1]))


def _unpacked(words: Tensor) -> Tensor:
    """int32 [rows, N / 8] -> int32 [N, rows], 0 to 15."""
    from qarl_formats.checkpoints.int4 import unpack_words

    return unpack_words(words, 4).unflatten(1, (-1, 8))[:, :, _PLACES].flatten(1).t()
