"""Patches: of a tensor that changed, only the 32-bit words that changed.

A step of training moves few codes of a quantized weight: most masters stay within their rounding interval. So most
32-bit words of most tensors are those that the sampler holds already, and a patch is the places and the new values of
the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Patch:
    """The changed 32-bit words of a tensor's bytes in row-major order, the last word zero-padded.

    indices: int32, or int64 where the tensor has 2^31 words or more; ascending. values: int32, as many.
    """

    indices: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.indices.nbytes + self.values.nbytes


def _words(tensor: Tensor) -> Tensor:
    """The int32 words of a contiguous tensor: a view where its size and address allow one, else a padded copy."""
    assert tensor.is_contiguous(), "a patch is of bytes in row-major order"
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.numel() % 4 == 0 and data.storage_offset() % 4 == 0:
        return data.view(torch.int32)
    padded = data.new_zeros(-(-data.numel() // 4) * 4)
    padded[: data.numel()] = data
    return padded.view(torch.int32)


def patch_of(old: Tensor, new: Tensor) -> Patch | None:
    """What turns `old` into `new`; None where they are equal bit for bit.

    old, new: of one shape, dtype and device, any dtype. The patch lives on their device.
    """
    assert (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device), (old.shape, new.shape)
    words = _words(new.contiguous())
    places = (_words(old.contiguous()) != words).nonzero()[:, 0]
    if not places.numel():
        return None
    return Patch(places.int() if words.numel() < 2**31 else places, words[places])


def apply_patch(tensor: Tensor, patch: Patch) -> None:
    """Turn the old tensor into the new one, in place. tensor: contiguous, on any device; the patch goes there."""
    words = _words(tensor)
    words[patch.indices.to(words.device, torch.int64)] = patch.values.to(words.device)
    if words.data_ptr() != tensor.data_ptr():
        data = tensor.detach().reshape(-1).view(torch.uint8)
        data.copy_(words.view(torch.uint8)[: data.numel()])
