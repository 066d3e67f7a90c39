"""Ragged responses, packed end to end, and sums over them that have one fixed order.

A minibatch is R responses of different lengths laid one after another in a vector of T tokens, without padding.

How a response is summed decides whether a run can be repeated. `index_add` is atomic, so unordered, on CUDA; a
difference of cumulative sums loses the small bands of TBPO in a long pack; `segment_reduce` and a row sum over a padded
matrix choose their order from alignment and width, so from the neighbours of a response. Here the tokens are scattered
into a zero-padded matrix [R, power of two] (every cell written once, so no atomics) and adjacent cells are added
pairwise until one is left. Padding adds exact zeros, so a response's sum is bit-equal in every micro-batch and on every
device, its rounding error grows with log2 of the length, and the backward is a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class Segments:
    """Which response each packed token belongs to.

    index: int64 [T], the response of each token, in packing order (0 ... 0 1 ... 1 ...).
    lengths: int64 [R], tokens of each response; a response may be empty.
    """

    index: Tensor  # (T,) int64
    lengths: Tensor  # (R,) int64

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> Segments:
        """Segments of responses with these token counts, packed in this order."""
        import torch

        from qarl.transfer import upload

        counts = torch.tensor(lengths, dtype=torch.int64)
        index = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        there = upload(torch.cat([index, counts]), torch.device(device or "cpu"))
        segments = cls(there[: index.numel()], there[index.numel() :])
        segments.max_length = max(lengths, default=0)  # known here; to ask a device for it is to wait for it
        return segments

    @cached_property
    def position(self) -> Tensor:
        """int64 [T]: the place of each token in its response, from 0."""
        import torch

        starts = self.lengths.cumsum(0) - self.lengths
        return torch.arange(self.index.shape[0], device=self.index.device) - starts[self.index]

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest response; 0 without responses."""
        return int(self.lengths.max()) if self.lengths.numel() else 0

    def sum(self, x: Tensor) -> Tensor:
        """Sum over each response: [T] -> [R], in the dtype of `x`; 0 for an empty response. Differentiable."""
        width = 1 << max(self.max_length - 1, 0).bit_length()
        cells = x.new_zeros(self.lengths.shape[0], width).index_put((self.index, self.position), x)
        while cells.shape[1] > 1:
            cells = cells[:, 0::2] + cells[:, 1::2]
        return cells[:, 0]

    def mean(self, x: Tensor) -> Tensor:
        """Mean over each response: [T] -> [R], in the dtype of `x`; 0 for an empty response. Differentiable."""
        return self.sum(x) / self.lengths.clamp(min=1)

    def expand(self, x: Tensor) -> Tensor:
        """Each response's value at each of its tokens: [R] -> [T]."""
        return x[self.index]
