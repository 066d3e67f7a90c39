"""int4 codes <-> int32 words, the layout of compressed-tensors `pack_to_int32`.

Code + 8 is a nibble; eight nibbles make a word, the first in the lowest bits; missing ones are zero bits.
On a little-endian machine byte j of a word therefore holds codes 2j (low) and 2j + 1 (high), so packing is one
combine of neighbouring bytes instead of eight shifts of words that are four times as large.
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
    """Pack codes along the last dimension.

    Args:
        codes: int8 [N, K], each in [-8, 7].

    Returns:
        int32 [N, ceil(K / 8)], as `weight_packed`.
    """
    nibbles = codes + _OFFSET
    missing = -codes.shape[1] % CODES_PER_WORD
    if missing:
        nibbles = pad(nibbles, (0, missing))
    pairs = nibbles.reshape(-1).view(torch.int16)  # low byte: even code, high byte: odd code
    packed = (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)  # the conversion keeps the low byte
    return packed.view(torch.int32).view(codes.shape[0], -1)


def unpack_int4(packed: Tensor, in_features: int) -> Tensor:
    """Undo `pack_int4`.

    Args:
        packed: int32 [N, ceil(K / 8)].
        in_features: K.

    Returns:
        int8 [N, K] codes in [-8, 7].
    """
    pairs = packed.reshape(-1).view(torch.uint8).to(torch.int16)
    pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
    codes = pairs.view(torch.int8).sub_(_OFFSET).view(packed.shape[0], -1)
    return codes if codes.shape[1] == in_features else codes[:, :in_features].contiguous()


def pack_zero_points(zero_points: Tensor) -> Tensor:
    """Pack zero points along the output dimension.

    Args:
        zero_points: int8 [N, groups], each in [-8, 7].

    Returns:
        int32 [ceil(N / 8), groups], contiguous, as `weight_zero_point`.
    """
    return pack_int4(zero_points.t()).t().contiguous()


def unpack_zero_points(packed: Tensor, out_features: int) -> Tensor:
    """Undo `pack_zero_points`: int32 [ceil(N / 8), groups] -> int8 [N, groups]."""
    return unpack_int4(packed.t(), out_features).t().contiguous()
