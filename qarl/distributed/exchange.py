"""Collectives on model tensors: sums in rank order (reduce-scatter) and all-gathers of rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from qarl.distributed.packed import Layout

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # name up to torch 2.12


class Exchange(ABC):
    """Collectives of one run on its device. All ranks call the same ones in the same order.

    `begin_sums` and `begin_gathers` return functions that wait for the result, each to be called once. Until then they
    keep the tensors in memory that messages read and write. On a GPU the current stream waits, not the host. It must be
    the stream that produced the input tensors.

    Attributes:
        rank: Rank of this process.
        count: Number of ranks.
    """

    rank: int
    count: int

    @abstractmethod
    def begin_sums(self, tensors: Sequence[Tensor], cuts: Sequence[Sequence[range]]) -> list[Callable[[], Tensor]]:
        """Start a reduce-scatter of several tensors in one message. The sum is in rank order.

        Computes ((first + second) + third) + ... in float32, so every transport gives the same bits. The tensors must
        not change until all results were waited for.

        Args:
            tensors: Float32, contiguous, (N, ...) each.
            cuts: For each tensor the rows that each rank gets, in order. They cover N; some may be empty.

        Returns:
            For each tensor a function that returns this rank's rows of the sum, contiguous and in their own memory.
        """

    def gather_rows(self, own: Tensor, cut: Sequence[range]) -> Tensor:
        """Blocking `begin_gathers` of one tensor into a new one."""
        out = own.new_empty(cut[-1].stop, *own.shape[1:])
        self.begin_gathers([own], [cut], [out])()
        return out

    @abstractmethod
    def begin_gathers(
        self, own: Sequence[Tensor], cuts: Sequence[Sequence[range]], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Start an all-gather of the rows of several tensors, of any dtypes, in one message.

        Args:
            own: This rank's rows of each tensor, (len(cut[rank]), ...), contiguous. Must not change until the
                result was waited for.
            cuts: For each tensor the rows of `out` that each rank fills, in order. Some may be empty; rows that belong
                to no rank are left unchanged.
            outs: Contiguous destinations (N, ...).

        Returns:
            A function that waits until all `outs` are complete.
        """

    @abstractmethod
    def move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors to ranks and receive tensors from ranks, all contiguous, excluding this rank itself.

        The sends of one rank to another must match that rank's receives, in the same order. Waits for all of them.
        """

    @abstractmethod
    def largest(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum of a float32 tensor over all ranks, as a new tensor on every rank.

        The tensor must not contain NaN, which backends treat differently. Infinity is allowed.
        """


class SingleProcessExchange(Exchange):
    """Exchange of a single process, which holds all rows."""

    rank, count = 0, 1

    def begin_sums(self, tensors: Sequence[Tensor], cuts: Sequence[Sequence[range]]) -> list[Callable[[], Tensor]]:
        return [tensor.clone for tensor in tensors]

    def begin_gathers(
        self, own: Sequence[Tensor], cuts: Sequence[Sequence[range]], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        for rows, (place,), out in zip(own, cuts, outs, strict=True):
            out[place.start : place.stop].copy_(rows)
        return lambda: None

    def move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        return

    def largest(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


class GroupExchange(Exchange):
    """Exchange over a torch process group.

    Sums and all-gathers of a single tensor send rows directly from memory, without packing, copying or padding. Rows of
    several tensors are packed into one message and unpacked (`qarl.distributed.packed`).

    The sums are computed here from received rows. A backend's reduce-scatter would send the same number of bytes, but
    its order of summation depends on its algorithm.

    Args:
        process_group: NCCL for a GPU, gloo for the CPU.
        rank, count: Rank in the group and its size.
        device: Device of the tensors.
    """

    def __init__(self, process_group: dist.ProcessGroup, rank: int, count: int, device: torch.device) -> None:
        self.rank, self.count, self.device = rank, count, device
        self._group = process_group
        self._others = [other for other in range(count) if other != rank]

    def begin_sums(self, tensors: Sequence[Tensor], cuts: Sequence[Sequence[range]]) -> list[Callable[[], Tensor]]:
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        parts: list[list[Tensor]] = []
        for tensor, cut in zip(tensors, cuts, strict=True):
            assert tensor.dtype == torch.float32, f"need float32 to sum, got {tensor.dtype}"
            rows = self._parts(tensor, cut)
            own = rows[self.rank]
            # One buffer per rank instead of one for all: the sum is made in one of them and outlives the rest.
            parts.append([own if other == self.rank else torch.empty_like(own) for other in range(self.count)])
            sends += [(other, rows[other]) for other in self._others]
            receives += [(other, parts[-1][other]) for other in self._others]
        works = self._begin(sends, receives)
        return [partial(_sum, works, some, self.rank) for some in parts]

    def begin_gathers(
        self, own: Sequence[Tensor], cuts: Sequence[Sequence[range]], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        for rows, cut, out in zip(own, cuts, outs, strict=True):
            assert out.is_contiguous() and len(cut) == self.count and cut[-1].stop <= len(out), (
                f"{cut} does not fill a contiguous tensor {tuple(out.shape)} for {self.count} ranks"
            )
            shape = len(cut[self.rank]), *out.shape[1:]
            assert rows.is_contiguous() and rows.dtype == out.dtype and rows.shape == shape, (
                f"{rows.dtype} {tuple(rows.shape)} are not rows {cut[self.rank]} of {out.dtype} {tuple(out.shape)}"
            )
        if not own:
            return lambda: None
        widths = [out.itemsize * math.prod(out.shape[1:]) for out in outs]
        if len(own) == 1 and (works := self._begin_in_place(own[0], cuts[0], outs[0])) is not None:
            return partial(_wait, works, *own, *outs)
        layout = Layout(cuts, widths)
        message = layout.pack(own, self.rank)
        if layout.even:
            arrived = message.new_empty(self.count * len(message))
            works = self._all_gather(arrived, message)
        else:
            arrived = message.new_empty(sum(layout.sizes))
            slots = arrived.split(layout.sizes)
            slots[self.rank].copy_(message)
            sends = [(other, message) for other in self._others]
            works = self._begin(sends, [(other, slots[other]) for other in self._others])
        return partial(_unpack, works, layout, arrived, outs, message, *own)

    def _begin_in_place(self, own: Tensor, cut: Sequence[range], out: Tensor) -> list[dist.Work] | None:
        """Start to gather one tensor in place; None if its rows must be moved afterwards."""
        if any(len(rows) != len(cut[0]) for rows in cut):
            places = [_bytes(out[rows.start : rows.stop]) for rows in cut]
            sends = [(other, _bytes(own)) for other in self._others]
            works = self._begin(sends, [(other, places[other]) for other in self._others])
            places[self.rank].copy_(_bytes(own))
            return works
        if cut[-1].stop - cut[0].start != self.count * len(own):
            return None
        return self._all_gather(_bytes(out[cut[0].start : cut[-1].stop]), _bytes(own))

    def _all_gather(self, out: Tensor, own: Tensor) -> list[dist.Work]:
        return [_all_gather(out, own, group=self._group, async_op=True)] if own.numel() else []

    def move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        out, into = (
            [(other, _bytes(tensor)) for other, tensor in pairs if other != self.rank] for pairs in (sends, receives)
        )
        _wait(self._begin(out, into))

    def largest(self, tensor: Tensor) -> Tensor:
        assert tensor.dtype == torch.float32, f"need float32, got {tensor.dtype}"
        found = tensor.clone(memory_format=torch.contiguous_format)
        if found.numel():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found

    def _parts(self, tensor: Tensor, cut: Sequence[range]) -> list[Tensor]:
        """Return each rank's rows of a tensor, as views."""
        assert tensor.is_contiguous() and len(cut) == self.count and cut[-1].stop == len(tensor), (
            f"{cut} does not cut a contiguous tensor {tuple(tensor.shape)} for {self.count} ranks"
        )
        return [tensor[rows.start : rows.stop] for rows in cut]

    def _begin(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[dist.Work]:
        """Start sends and receives of (other rank, tensor), batched into one launch on a GPU.

        Between two ranks tensors arrive in the order in which they are sent.
        """
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=other)
            for operation, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for other, tensor in pairs
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []


def _wait(works: list[dist.Work], *kept: Tensor) -> None:
    """Wait for messages, for each of them once. kept: tensors that the messages read and write until then."""
    while works:
        works.pop(0).wait()


def _sum(works: list[dist.Work], parts: list[Tensor], rank: int) -> Tensor:
    """Wait for the other ranks' rows, and add them to this rank's in rank order."""
    _wait(works)
    if len(parts) == 1:
        return parts[0].clone()
    total = parts[1 if rank == 0 else 0]  # received; the own rows are the caller's
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
    parts.clear()  # frees the other ranks' rows
    return total


def _unpack(works: list[dist.Work], layout: Layout, arrived: Tensor, outs: Sequence[Tensor], *kept: Tensor) -> None:
    """Wait for all ranks' messages, and copy their rows. kept: see `_wait`."""
    _wait(works)
    layout.unpack(arrived, outs)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, because backends do not support every dtype."""
    return tensor.reshape(-1).view(torch.uint8)
