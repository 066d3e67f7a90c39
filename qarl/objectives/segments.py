"""Ragged responses packed end to end without padding, and reductions over them in a fixed order.

A minibatch is a vector of T tokens: R responses of different lengths, one after another.

A run is repeatable only if sums have a fixed order. Rejected alternatives: `index_add` uses atomics on CUDA, so its
order varies. A difference of cumulative sums is too inexact for the narrow bands of TBPO in a long pack.
`segment_reduce` and a row sum over a padded matrix choose their order by alignment and width, so the sum of a response
would depend on its neighbours.

Here tokens are scattered into a zero-padded matrix (R, power of two), each cell written once, and adjacent cells are
added pairwise. Padding adds exact zeros, so the sum of a response has the same bits in every micro-batch and on every
device. Its rounding error grows with log2 of the length, and the backward is a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Aggregation = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass
class Segments:
    """The response of each packed token.

    Attributes:
        index: (T,) int64, response of each token in packing order (0 ... 0 1 ... 1 ...).
        lengths: (R,) int64, tokens per response; a response may be empty.
    """

    index: Tensor
    lengths: Tensor

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> Segments:
        """Pack responses with these token counts in this order."""
        import torch

        from qarl.utils.transfer import upload

        counts = torch.tensor(lengths, dtype=torch.int64)
        index = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        there = upload(torch.cat([index, counts]), torch.device(device or "cpu"))
        segments = cls(there[: index.numel()], there[index.numel() :])
        segments.max_length = max(lengths, default=0)  # reading it from a GPU would synchronize
        return segments

    @cached_property
    def position(self) -> Tensor:
        """(T,) int64: position of each token in its response, from 0."""
        import torch

        starts = self.lengths.cumsum(0) - self.lengths
        return torch.arange(self.index.shape[0], device=self.index.device) - starts[self.index]

    @cached_property
    def max_length(self) -> int:
        """Number of tokens of the longest response; 0 without responses."""
        return int(self.lengths.max()) if self.lengths.numel() else 0

    @property
    def present(self) -> Tensor:
        """(R,) bool: responses with at least one token. Empty responses enter no statistic."""
        return self.lengths > 0

    def sum(self, x: Tensor) -> Tensor:
        """Sum over each response: (T,) -> (R,), in the dtype of `x`; 0 for an empty response. Differentiable."""
        width = 1 << max(self.max_length - 1, 0).bit_length()
        cells = x.new_zeros(self.lengths.shape[0], width).index_put((self.index, self.position), x)
        while cells.shape[1] > 1:
            cells = cells[:, 0::2] + cells[:, 1::2]
        return cells[:, 0]

    def mean(self, x: Tensor) -> Tensor:
        """Mean over each response: (T,) -> (R,), in the dtype of `x`; 0 for an empty response. Differentiable."""
        return self.sum(x) / self.lengths.clamp(min=1)

    def any(self, mask: Tensor) -> Tensor:
        """Responses with a token under the bool mask: (T,) -> (R,) bool."""
        return self.sum(mask.long()) > 0

    def expand(self, x: Tensor) -> Tensor:
        """Repeat each response's value at its tokens: (R,) -> (T,)."""
        return x[self.index]


class Totals(NamedTuple):
    """Sizes of the whole minibatch, over all its micro-batches."""

    total_responses: int  # including empty ones
    total_tokens: int  # response tokens
    max_tokens: int  # divisor of `seq-mean-token-sum-norm`, the run's max_response_length


def aggregate(value: Tensor, segments: Segments, mode: Aggregation, totals: Totals) -> Tensor:
    """Reduce the token values (T,) of a micro-batch to its share of the minibatch's objective, a scalar to maximize.

    seq-mean-token-mean      mean over responses of the mean over tokens     (GRPO)
    token-mean               mean over all tokens of the minibatch           (DAPO)
    seq-mean-token-sum       mean over responses of the sum over tokens
    seq-mean-token-sum-norm  the same, divided by the constant max_tokens    (Dr. GRPO)

    Each token is divided by its own constant. So its gradient has the same bits for any split into micro-batches, and
    the shares of the micro-batches add up to the minibatch. Without tokens the result is 0, attached to the graph.

    Args:
        value: (T,) values to maximize.
        segments: The response of each token.
        mode: The aggregation.
        totals: Sizes of the whole minibatch.

    Returns:
        A scalar with the gradient of `value`.
    """
    if mode == "seq-mean-token-mean":
        return (value / (segments.expand(segments.lengths) * totals.total_responses)).sum()
    if mode == "token-mean":
        return (value / totals.total_tokens).sum()
    if mode == "seq-mean-token-sum":
        return (value / totals.total_responses).sum()
    assert mode == "seq-mean-token-sum-norm", f"unknown aggregation {mode!r}"
    return (value / (totals.total_responses * totals.max_tokens)).sum()
