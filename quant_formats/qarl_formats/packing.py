"""Packing of int4 codes into int32 words, in the layout of compressed-tensors `pack_to_int32`.

A nibble is code + 8. A word has eight nibbles, the first in the lowest bits; missing ones are zero bits. On a
little-endian machine byte j of a word therefore holds codes 2j (low) and 2j + 1 (high), so packing combines
neighbouring bytes once instead of shifting words, which are four times as large, eight times.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn.functional import pad

assert sys.byteorder == "little", "int4 packing reads words as bytes, which needs a little-endian machine"

CODES_PER_WORD = 8
_OFFSET = 8


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes along the last dimension: int8 [N, K], each in [-8, 7] -> int32 [N, ceil(K / 8)] (`weight_packed`)."""
    nibbles = codes + _OFFSET
    missing = -codes.shape[1] % CODES_PER_WORD
    if missing:
        nibbles = pad(nibbles, (0, missing))
    pairs = nibbles.reshape(-1).view(torch.int16)  # low byte: even code, high byte: odd code
    packed = (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)  # the conversion keeps the low byte
    return packed.view(torch.int32).view(codes.shape[0], -1)


def unpack_int4(packed: Tensor, in_features: int) -> Tensor:
    """Undo `pack_int4`: int32 [N, ceil(K / 8)] -> int8 [N, K]. in_features: K."""
    pairs = packed.reshape(-1).view(torch.uint8).to(torch.int16)
    pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
    codes = pairs.view(torch.int8).sub_(_OFFSET).view(packed.shape[0], -1)
    return codes if codes.shape[1] == in_features else codes[:, :in_features].contiguous()


def pack_zero_points(zero_points: Tensor) -> Tensor:
    """Pack zero points along dim 0: int8 [N, groups], each in [-8, 7] -> int32 [ceil(N / 8), groups], contiguous."""
    return pack_int4(zero_points.t()).t().contiguous()


def unpack_zero_points(packed: Tensor, out_features: int) -> Tensor:
    """Undo `pack_zero_points`: int32 [ceil(N / 8), groups] -> int8 [N, groups]."""
    return unpack_int4(packed.t(), out_features).t().contiguous()
