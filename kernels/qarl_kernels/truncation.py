"""Temperature, top-k, top-p and min-p: from logits to the sampling distribution, and recorded kept sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

# Truncated tokens keep a finite logit this far under the row's maximum (exp(-50) = 2e-22: never drawn), so that neither
# the entropy nor any backward meets an infinity. `token_logprobs` still reports -inf for them.
CUT_LOGIT_GAP = 50.0
ROW_VALUES = 4  # float32 values in 16 bytes, the alignment of rows on a GPU


@dataclass(frozen=True)
class Truncation:
    """How logits become the sampling distribution: temperature, then top-k and min-p, then top-p on what remains.

    Temperature 0 is greedy: the likeliest token is drawn, and log-probs are those of the model's own distribution
    (temperature 1, no truncation).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def active(self) -> bool:
        return self.ranked or (self.min_p > 0.0 and not self.greedy)

    @property
    def ranked(self) -> bool:
        """Whether tokens are ranked (top-k or top-p), which needs all logits of a row at once."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def divisor(self) -> float:
        """The divisor of the logits."""
        return 1.0 if self.greedy else self.temperature


class KeptSets(NamedTuple):
    """The tokens that truncation kept, for R states; tensors on the CPU.

    A row is stored as token ids, 4 bytes each, or as a bitmask of V / 8 bytes if that is smaller. A list of ids alone
    would take 4 V bytes for a flat distribution, 600 KB per token with a vocabulary of 150,000.

    Attributes:
        counts: int32 (R,), kept tokens of a row stored as ids, or -1 for a row stored as a bitmask.
        ids: int32 (sum of counts,), ascending in each row.
        bits: uint8 (D, ceil(V / 8)), the rows stored as bitmasks; bit i of byte b is token 8 b + i.
    """

    counts: Tensor
    ids: Tensor
    bits: Tensor

    @classmethod
    def of(cls, cut: Tensor) -> KeptSets:
        """Return the tokens that a mask of cut tokens, bool (R, V), leaves. Synchronizes with the mask's device."""
        kept, vocabulary = ~cut, cut.shape[-1]
        counts = kept.sum(-1, dtype=torch.int32)
        dense = counts > vocabulary // 32
        ids = (kept & ~dense[:, None]).nonzero()[:, 1].int()
        bytes_ = torch.nn.functional.pad(kept[dense], (0, -vocabulary % 8)).unflatten(-1, (-1, 8))
        bits = (bytes_ * _powers(cut.device)).sum(-1, dtype=torch.uint8)
        return cls(counts.masked_fill(dense, -1).cpu(), ids.cpu(), bits.cpu())

    @classmethod
    def cat(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """Return the rows of all parts, one part after the other."""
        return cls(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def split(self, lengths: Sequence[int]) -> list[KeptSets]:
        """Split into parts with these numbers of rows."""
        counts = self.counts.split(list(lengths))
        ids = self.ids.split([int(part.clamp(min=0).sum()) for part in counts])
        bits = self.bits.split([int((part < 0).sum()) for part in counts])
        return [KeptSets(*part) for part in zip(counts, ids, bits, strict=True)]

    def cut(self, vocabulary: int, device: torch.device) -> Tensor:
        """Return the mask of cut tokens, bool (R, V), on a device."""
        counts, ids = self.counts.to(device), self.ids.to(device).long()
        rows = torch.arange(len(counts), device=device)
        rows = rows.repeat_interleave(counts.clamp(min=0).long(), output_size=len(ids))
        cut = torch.ones(len(counts), vocabulary, dtype=torch.bool, device=device)
        cut[rows, ids] = False
        kept = (self.bits.to(device)[..., None] & _powers(device)) != 0
        cut[counts < 0] = ~kept.flatten(1)[:, :vocabulary]
        return cut


def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


@dataclass(frozen=True, eq=False)
class Recording(Truncation):
    """Truncation that also stores the kept sets of a `token_logprobs`, one entry per chunk of rows."""

    into: list[KeptSets] = field(default_factory=list)

    @classmethod
    def of(cls, truncation: Truncation) -> Recording:
        return cls(truncation.temperature, truncation.top_k, truncation.top_p, truncation.min_p)


@dataclass(frozen=True, eq=False)
class Replay(Truncation):
    """Truncation to recorded sets, one per row, instead of sets from the logits. Temperature is applied as usual."""

    kept: KeptSets | None = None

    @classmethod
    def of(cls, truncation: Truncation, kept: KeptSets) -> Replay:
        return cls(truncation.temperature, truncation.top_k, truncation.top_p, truncation.min_p, kept)

    def chunks(self, size: int) -> list[KeptSets | None]:
        """Split the sets into parts of `size` rows; the last may be shorter."""
        assert self.kept is not None, "a replay without sets"
        rows = len(self.kept.counts)
        return [*self.kept.split([min(size, rows - start) for start in range(0, rows, size)])]


def normalized(logits: Tensor) -> Tensor:
    """Compute the log-softmax of rows (R, V) float32; its bits do not depend on a row's index.

    On a GPU torch sums a row from the 16-byte boundary before it, so unaligned rows sum in another order. They are
    padded with tokens of probability 0.
    """
    more = -logits.shape[-1] % ROW_VALUES if logits.device.type == "cuda" else 0
    if not more:
        return torch.log_softmax(logits, -1)
    filled = torch.nn.functional.pad(logits, (0, more), value=float("-inf"))
    return torch.log_softmax(filled, -1)[:, :-more]


@dataclass(frozen=True)
class Distribution:
    """Sampling distributions of R states. No method synchronizes with the device.

    Attributes:
        logits: (R, V) float32, arbitrary row stride, after temperature; CUT_LOGIT_GAP under the row's maximum for
            truncated tokens.
        truncated: Whether tokens may be truncated.
        sums: Largest logit and log(sum(exp(logit - largest))) per row, float32 (R,) each, if the learner sums over
            tiles of the vocabulary (`qarl_kernels.head`). None: the learner takes a softmax of whole rows.
    """

    logits: Tensor
    truncated: bool
    sums: tuple[Tensor, Tensor] | None = None

    @cached_property
    def lse(self) -> Tensor:
        """log(sum(exp(logits))), float32 (R,)."""
        if self.sums is None:
            return self.logits.amax(-1) - self._normalized.amax(-1)  # the same bits for any row index
        largest, log_total = self.sums
        return largest + log_total

    @cached_property
    def _normalized(self) -> Tensor:
        """The log-softmax of the logits, (R, V); used without `sums`."""
        return normalized(self.logits)

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Return the log-prob of one token (R,) int64 per row, float32 (R,), in nats, bit for bit the learner's.

        Truncated tokens have -inf.
        """
        if self.sums is None:
            return self.all_logprobs().gather(-1, tokens[:, None])[:, 0]
        return self._of(self.logits.gather(-1, tokens[:, None]))[:, 0]

    def all_logprobs(self) -> Tensor:
        """Return the log-probs of all tokens, (R, V)."""
        return self._of(self.logits)

    def _of(self, chosen: Tensor) -> Tensor:
        """Return the log-probs of logits (R, n); without `sums`, n is V."""
        if self.sums is None:
            found, largest = self._normalized, chosen.amax(-1)
        else:
            largest, log_total = self.sums
            found = (chosen - largest[:, None]).sub_(log_total[:, None])
        if self.truncated:  # no kept token is so far down, except with a min-p that truncates next to nothing
            found = found.masked_fill(chosen == (largest - CUT_LOGIT_GAP)[:, None], float("-inf"))
        return found
