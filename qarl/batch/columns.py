"""Per-token values of a batch, filled and read in parts and shared between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from qarl_kernels.truncation import KeptSets
from torch import Tensor

from qarl.distributed.ranks import Ranks
from qarl.utils.transfer import upload


class Part(Protocol):
    """The attributes of a `qarl.batch.batch.Part` that columns read."""

    def __len__(self) -> int: ...

    @property
    def indices(self) -> tuple[int, ...]: ...

    @property
    def lengths(self) -> list[int]: ...

    @property
    def own_rows(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...


class Column:
    """Float32 values per response token of a batch, without gradient: one tensor (T_r,) or (T_r, W) per response.

    T_r counts the tokens that the policy wrote (`Rollout.written`). Values stay on the device that filled them. The
    first read on the CPU copies all of them and is the only operation that synchronizes with the device.
    """

    def __init__(self, values: Sequence[Tensor | None]) -> None:
        self._values = list(values)
        self._new: set[int] = set()  # responses filled on this rank since the last `share`

    @classmethod
    def empty(cls, responses: int) -> Column:
        """Return a column whose responses are not filled yet."""
        return cls([None] * responses)

    def fill(self, part: Part, packed: Tensor, mask: Tensor | None = None) -> None:
        """Store the values of a part's responses.

        Args:
            part: The part.
            packed: (T,) or (T, W), concatenated over the responses, on any device.
            mask: (T,) bool, values to store; the others keep their value (initially 0). Default: all.
        """
        if mask is not None:
            before = [self._values[index] for index in part.indices]
            pairs = zip(part.lengths, before, strict=True)
            old = [packed.new_zeros(n) if x is None else x.to(packed.device) for n, x in pairs]
            packed = torch.where(mask, packed.detach(), torch.cat(old))
        for index, values in zip(part.indices, packed.detach().split(part.lengths), strict=True):
            self._values[index] = values
        self._new.update(part.indices)

    def known(self, part: Part) -> bool:
        """Return whether all of the part's responses are filled."""
        return all(self._values[index] is not None for index in part.indices)

    def share(self, ranks: Ranks) -> None:
        """Send newly filled responses to all ranks. A collective.

        If several ranks filled the same response, their values are equal, including those of tokens that a mask left
        out.
        """
        if ranks.count == 1:
            return
        self._fetch()
        own = [(index, self._filled(index)) for index in sorted(self._new)]
        self._new.clear()
        found = [(index, values.numel(), values[0].numel() if len(values) else 1) for index, values in own]
        places = torch.tensor(found, dtype=torch.int64).reshape(-1, 3)
        packed = torch.cat([values.reshape(-1) for _, values in own]) if own else torch.empty(0)
        for there, values in zip(ranks.gather_tensors(places), ranks.gather_tensors(packed), strict=True):
            for (index, _, width), value in zip(there.tolist(), values.split(there[:, 1].tolist()), strict=True):
                self._values[index] = value if width == 1 else value.view(-1, width)

    def read(self, part: Part) -> Tensor:
        """Return the values of the part's responses, concatenated: (T,) or (T, W), on the part's device."""
        if {self._filled(index).device.type for index in part.indices} not in ({"cpu"}, {part.device.type}):
            self._fetch()
        return upload(torch.cat([self._filled(index) for index in part.indices]), part.device)

    def __getitem__(self, response: int) -> Tensor:
        """Return the values of one response, (T_r,), on the CPU."""
        if self._filled(response).device.type != "cpu":
            self._fetch()
        return self._filled(response)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def _filled(self, response: int) -> Tensor:
        values = self._values[response]
        assert values is not None, f"response {response} has not been filled"
        return values

    def _fetch(self) -> None:
        """Copy all values to the CPU."""
        on_device = {index: x for index, x in enumerate(self._values) if x is not None and x.device.type != "cpu"}
        if on_device:
            copies = torch.cat(list(on_device.values())).cpu().split([len(x) for x in on_device.values()])
            for index, values in zip(on_device, copies, strict=True):
                self._values[index] = values


class KeptColumn:
    """Tokens that truncation (top-p, top-k, min-p) kept, one set per response token of a batch. On the CPU.

    The first forward over each response, at the rollout's weights, fills the sets. Later forwards of the step normalize
    over the same sets, so a token cannot leave the learner's set because the learner has moved ("keep sampling mask",
    DeepSeek-V3.2).
    """

    def __init__(self, responses: int) -> None:
        self._values: list[KeptSets | None] = [None] * responses
        self._new: set[int] = set()  # responses filled on this rank since the last `share`

    def fill(self, part: Part, chunks: Sequence[KeptSets]) -> None:
        """Store the sets of a part's response tokens.

        Args:
            part: The part.
            chunks: Sets of consecutive tokens, in chunks of any size.
        """
        for index, values in zip(part.indices, KeptSets.cat(chunks).split(part.lengths), strict=True):
            self._values[index] = values
        self._new.update(part.indices)

    def read(self, part: Part) -> KeptSets | None:
        """Return the sets of a part's response tokens, concatenated; None if any response is not filled."""
        found = [values for index in part.indices if (values := self._values[index]) is not None]
        return KeptSets.cat(found) if len(found) == len(part) else None

    def share(self, ranks: Ranks) -> None:
        """Send newly filled responses to all ranks. A collective."""
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


class RoutingColumn:
    """Experts that the learner chose at the rollout's weights, per row of each response. On the CPU.

    The first forward over each response fills it and later forwards of the step replay it. A token thus uses the same
    experts in both policies of a ratio (routing replay, GSPO).
    """

    def __init__(self, responses: int) -> None:
        self._values: list[Tensor | None] = [None] * responses  # (prompt + response - 1, L, k) int16 each
        self._new: set[int] = set()  # responses filled on this rank since the last `share`

    def fill(self, part: Part, chosen: Tensor) -> None:
        """Store the experts of one forward over a part. A shared prompt is stored with each of its responses.

        Args:
            part: The part.
            chosen: (rows, L, k) expert indices.
        """
        rows, prompt, at = chosen.to(torch.int16).cpu(), chosen.new_empty(0).cpu(), 0
        for index, own in zip(part.indices, part.own_rows, strict=True):
            if own.prompt:
                prompt = rows[at : at + own.prompt]
            start = at + own.prompt
            at = start + own.response
            self._values[index] = torch.cat((prompt, rows[start:at]))
        self._new.update(part.indices)

    def read(self, part: Part) -> Tensor | None:
        """Return the experts of a forward over a part, (rows, L, k) int16 on its device; None if any is unknown."""
        found = []
        for index, own in zip(part.indices, part.own_rows, strict=True):
            if (values := self._values[index]) is None:
                return None
            found.append(values[len(values) - own.prompt - own.response :])
        return upload(torch.cat(found), part.device)

    def share(self, ranks: Ranks) -> None:
        """Send newly filled responses to all ranks. A collective."""
        if ranks.count == 1:
            return
        own = [(index, values) for index in sorted(self._new) if (values := self._values[index]) is not None]
        self._new.clear()
        places = torch.tensor([(index, *values.shape) for index, values in own], dtype=torch.int64).reshape(-1, 4)
        packed = torch.cat([values.reshape(-1) for _, values in own]) if own else torch.empty(0, dtype=torch.int16)
        for there, data in zip(ranks.gather_tensors(places), ranks.gather_tensors(packed), strict=True):
            shapes = [tuple(row) for row in there[:, 1:].tolist()]
            parts = data.split([rows * layers * k for rows, layers, k in shapes])
            for index, shape, values in zip(there[:, 0].tolist(), shapes, parts, strict=True):
                self._values[index] = values.view(shape)
