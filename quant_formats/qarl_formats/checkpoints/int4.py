"""int4 weights of AWQ and GPTQ, which store codes 0 to 15 and zero points of the same kind."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qarl_formats.packing import pack_int4, pack_zero_points
from qarl_formats.scheme import Scheme, Shape
from qarl_formats.weight import LowBitWeight

OFFSET = 8  # our codes are -8 to 7


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> int32 [..., n * 32 / bits] of unsigned numbers, the first in the lowest bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def dequantized(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """(codes - zeros) * scales in float32. codes: [N, K]; zeros, scales: [N, groups]; groups: int64 [K]."""
    return (codes - zeros[:, groups]).float().mul_(scales.float()[:, groups])


def as_int4(codes: Tensor, zeros: Tensor, scales: Tensor, shape: Shape, scheme: Scheme) -> LowBitWeight:
    """Return a weight with packed int4 codes. Its scale dtype is that of `scales`.

    codes [N, K], zeros [N, groups]: Integers 0 to 15; zeros are all 8 if the scheme is symmetric. scales: [N, groups].
    """
    scheme = replace(scheme, scale_dtype=str(scales.dtype).removeprefix("torch."))
    tensors = {"weight_packed": pack_int4((codes - OFFSET).to(torch.int8)), "weight_scale": scales.contiguous()}
    if not scheme.symmetric:
        tensors["weight_zero_point"] = pack_zero_points((zeros - OFFSET).to(torch.int8))
    return LowBitWeight(scheme, tensors | {"weight_shape": torch.tensor(shape)}, shape)
