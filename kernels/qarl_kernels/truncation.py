"""How the distribution over tokens is shaped that one is drawn from, and what it is then."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Tokens cut off keep a finite logit this far under the row's maximum (exp(-50) = 2e-22: never drawn), so that neither
# the entropy nor any backward meets an infinity. `token_logprobs` reports -inf for them all the same.
CUT_LOGIT_GAP = 50.0
ROW_VALUES = 4  # float32 values in the 16 bytes that a row of a GPU begins at a multiple of


@dataclass(frozen=True)
class Truncation:
    """How the sampler shapes the distribution before drawing: temperature, top-k and min-p, top-p of what these leave.

    Temperature 0 is greedy: the likeliest token is drawn, and log-probs are those of the distribution as the model
    gave it (temperature 1, nothing cut).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def active(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def divisor(self) -> float:
        """What logits are divided by."""
        return 1.0 if self.greedy else self.temperature


def normalized(logits: Tensor) -> Tensor:
    """Log-softmax of rows (R, V) float32, whose bits do not depend on which row it is.

    On a GPU torch adds up a row from the multiple of 16 bytes before it on, so that rows which begin beside one sum in
    another order. They are filled up with tokens of no probability.
    """
    more = -logits.shape[-1] % ROW_VALUES if logits.device.type == "cuda" else 0
    if not more:
        return torch.log_softmax(logits, -1)
    filled = torch.nn.functional.pad(logits, (0, more), value=float("-inf"))
    return torch.log_softmax(filled, -1)[:, :-more]


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
            return self.logits.amax(-1) - self._normalized.amax(-1)  # of the bits that a row has by itself
        largest, log_total = self.sums
        return largest + log_total

    @cached_property
    def _normalized(self) -> Tensor:
        """(R, V), without `sums`: the log-softmax of the logits."""
        return normalized(self.logits)

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
            found, largest = self._normalized, chosen.amax(-1)
        else:
            largest, log_total = self.sums
            found = (chosen - largest[:, None]).sub_(log_total[:, None])
        if self.truncated:  # no token that is kept is so far down, but for a min-p that cuts next to nothing
            found = found.masked_fill(chosen == (largest - CUT_LOGIT_GAP)[:, None], float("-inf"))
        return found
