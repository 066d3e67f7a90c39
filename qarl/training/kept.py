"""The kept sets of a batch's response tokens: recorded at the rollout's weights, replayed in later forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from qarl_kernels.truncation import KeptSets

from qarl.distributed.ranks import Ranks

if TYPE_CHECKING:
    from qarl.training.batch import Part


class KeptColumn:
    """The sets of tokens that truncation kept, one per response token of a batch; on the CPU.

    Filled by the first forward over each response, at the rollout's weights. The later forwards of a training step
    normalize over these sets, so that no token falls out of the learner's set because the learner has moved
    (DeepSeek-V3.2, "keep sampling mask").
    """

    def __init__(self, responses: int) -> None:
        self._values: list[KeptSets | None] = [None] * responses
        self._new: set[int] = set()  # filled in here since all ranks had the same

    def fill(self, part: Part, chunks: Sequence[KeptSets]) -> None:
        """Store the sets of a part's response tokens, packed, in chunks of any number of rows."""
        lengths = [len(response) for response in part.responses]
        for index, values in zip(part.indices, KeptSets.cat(chunks).split(lengths), strict=True):
            self._values[index] = values
        self._new.update(part.indices)

    def read(self, part: Part) -> KeptSets | None:
        """Return the sets of a part's response tokens, packed; None unless all of its responses are filled in."""
        found = [values for index in part.indices if (values := self._values[index]) is not None]
        return KeptSets.cat(found) if len(found) == len(part) else None

    def share(self, ranks: Ranks) -> None:
        """Give every rank what any of them has filled in since the last time; a collective."""
        if ranks.count == 1:
            return
        own = [(index, values) for index in sorted(self._new) if (values := self._values[index]) is not None]
        self._new.clear()
        places = torch.tensor([(index, len(values.counts)) for index, values in own]).long().reshape(-1, 2)
        none = KeptSets(*(torch.empty(0, dtype=dtype) for dtype in (torch.int32, torch.int32, torch.uint8)))
        packed = KeptSets.cat([values for _, values in own]) if own else none
        every = [ranks.gather_tensors(tensor) for tensor in (places, *packed)]
        for there, *tensors in zip(*every, strict=True):
            for index, values in zip(there[:, 0].tolist(), KeptSets(*tensors).split(there[:, 1].tolist()), strict=True):
                self._values[index] = values
