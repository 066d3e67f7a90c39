"""Temperature, top-k, top-p and min-p: from logits to the sampling distribution, and kept sets to use again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

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
        """Return what a mask of cut tokens, bool (R, V), keeps. Waits for the device of the mask."""
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
        """Return this many rows at a time."""
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
    """Truncation to recorded sets, one per row, whatever the logits are. Temperature is applied as usual."""

    kept: KeptSets | None = None

    @classmethod
    def of(cls, truncation: Truncation, kept: KeptSets) -> Replay:
        return cls(truncation.temperature, truncation.top_k, truncation.top_p, truncation.min_p, kept)

    def chunks(self, size: int) -> list[KeptSets | None]:
        """Return the sets of `size` rows at a time."""
        assert self.kept is not None, "a replay without sets"
        rows = len(self.kept.counts)
        return [*self.kept.split([min(size, rows - start) for start in range(0, rows, size)])]


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
