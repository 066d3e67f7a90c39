"""The order of features in a KV cache of e4m3: in pairs, for head sizes that kernels hold without padding.

A head's features i and i + D/2 stand side by side, the first one in the lower byte. So 16 bits of the cache are an
operand of a decode: they go into a tensor core's registers by the instructions for 16-bit matrices, and there come
apart into the same place of a tile of the first features and of one of the second, in no thread but their own. A
rotation turns these two features with one another, so the thread that writes has both.

Other head sizes have features in their order. Shape, strides and dtype of a cache are the same either way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import widen_e4m3, widen_pairs
from qarl_kernels.flash.layout import padded


def paired(dim: int) -> bool:
    """Whether a cache of e4m3 has features of heads of this size in pairs."""
    return padded(dim) == dim


def in_pairs(cache: Tensor) -> Tensor:
    """A cache (..., D) as kernels take it: int16 (..., D/2) where it holds pairs, else itself. No copy."""
    if cache.dtype.itemsize > 1 or not paired(cache.shape[-1]):
        return cache
    if cache.storage_offset() % 2 or any(stride % 2 for stride in cache.stride()[:-1]):
        raise ValueError(
            f"a cache of e4m3 holds pairs: it must start, and have its strides, at even numbers of bytes, not "
            f"{cache.storage_offset()} and {tuple(cache.stride())}"
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
    """Rows of a cache as tiles of `dtype` side by side: a tuple of one (N, D), or of two (N, D/2) where it has pairs.

    at: pointers to q's dtype, e4m3, or int16 that hold pairs of e4m3.
    """
    x = tl.load(at, mask=mask, other=0.0)
    if at.dtype.element_ty == tl.int16:
        return widen_pairs(x, dtype)
    else:
        return (widen_e4m3(x, dtype),)
