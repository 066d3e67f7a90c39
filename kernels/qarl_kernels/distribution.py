"""The distribution that a token is drawn from, and the log-probs that the learner's own function gives its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qarl_kernels.logprob import CUT_LOGIT_GAP, Truncation, fused, logits_of, truncate_


@dataclass(frozen=True)
class Distribution:
    """Of R states. Nothing here waits for the device.

    logits: float32 (R, V), rows any distance apart, after temperature; of a token that is cut CUT_LOGIT_GAP under the
        row's largest.
    truncated: whether tokens may be cut.
    sums: where the learner sums over tiles of the vocabulary (`qarl_kernels.head`), its float32 (R,) each: the largest
        logit, and the logarithm of the sum of exp(logit - largest). None: it takes a softmax of whole rows.
    """

    logits: Tensor
    truncated: bool
    sums: tuple[Tensor, Tensor] | None = None

    @cached_property
    def lse(self) -> Tensor:
        """float32 (R,), the logarithm of the sum of exp(logit)."""
        if self.sums is None:
            return torch.logsumexp(self.logits, -1)
        largest, log_total = self.sums
        return largest + log_total

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Of one token (R,) int64 a row: float32 (R,), in nats, bit for bit the learner's; -inf of a token cut."""
        if self.sums is None:
            return self.all_logprobs().gather(-1, tokens[:, None])[:, 0]
        return self._of(self.logits.gather(-1, tokens[:, None]))[:, 0]

    def all_logprobs(self) -> Tensor:
        """Of every token, (R, V)."""
        return self._of(self.logits)

    def _of(self, chosen: Tensor) -> Tensor:
        """Log-probs of logits (R, n); without `sums`, of all of them."""
        if self.sums is None:
            found, largest = torch.log_softmax(chosen, -1), chosen.amax(-1)
        else:
            largest, log_total = self.sums
            found = (chosen - largest[:, None]).sub_(log_total[:, None])
        if self.truncated:  # no token that is kept is so far down, but for a min-p that cuts next to nothing
            found.masked_fill_(chosen == (largest - CUT_LOGIT_GAP)[:, None], float("-inf"))
        return found


def distribution(hidden: Tensor, weight: Tensor, truncation: Truncation, kernels: bool = True) -> Distribution:
    """Of the tokens that follow states (R, H) with an output layer (V, H); see `logits_of` for dtypes and `kernels`."""
    if kernels and fused(hidden, weight, truncation):
        from qarl_kernels.head import fused_distribution  # imports Triton, which the CPU does not need

        return fused_distribution(hidden, weight, truncation)
    logits = logits_of(hidden, weight, kernels)
    truncate_(logits, truncation)
    return Distribution(logits, truncation.active)
