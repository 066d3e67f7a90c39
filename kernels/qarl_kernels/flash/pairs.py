"""Feature order of an e4m3 KV cache: interleaved in pairs, for head sizes that kernels use without padding.

Features i and i + D/2 of a head are adjacent, the first in the lower byte. So 16 bits of the cache are one operand of a
decode: the instructions for 16-bit matrices load them into a tensor core's registers, where each thread splits its own
values into a tile of the first features and one of the second, without exchanging data. The rotary embedding rotates
these two features with each other, so the thread that writes them has both.

Other head sizes keep the usual order. Shape, strides and dtype of a cache are the same either way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import widen_e4m3, widen_pairs
from qarl_kernels.flash.layout import padded


def paired(dim: int) -> bool:
    """Return whether an e4m3 cache interleaves the features of heads of this size."""
    return padded(dim) == dim


def in_pairs(cache: Tensor) -> Tensor:
    """Return the view of a cache (..., D) that kernels take: int16 (..., D/2) if it is interleaved, else itself."""
    if cache.dtype.itemsize > 1 or not paired(cache.shape[-1]):
        return cache
    if cache.storage_offset() % 2 or any(stride % 2 for stride in cache.stride()[:-1]):
        raise ValueError(
            f"the offset and strides of an e4m3 cache must be even, not {cache.storage_offset()} and "
            f"{tuple(cache.stride())}"
        )
    return cache.view(torch.int16)


def from_cache(rows: Tensor) -> Tensor:
    """Return rows of a cache of e4m3, (..., D), with the features in their usual order, in new memory."""
    if not paired(rows.shape[-1]):
        return rows.clone()
    pairs = rows.view(torch.uint8).unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).flatten(-2).view(rows.dtype)


@triton.jit
def load_features(at, mask, dtype: tl.constexpr):
    """Load rows of a cache as tiles of `dtype`: a tuple of one (N, D), or of two (N, D/2) if it is interleaved.

    at: pointers to `dtype`, e4m3, or int16 holding pairs of e4m3.
    """
    x = tl.load(at, mask=mask, other=0.0)
    if at.dtype.element_ty == tl.int16:
        return widen_pairs(x, dtype)
    else:
        return (widen_e4m3(x, dtype),)
