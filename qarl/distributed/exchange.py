"""Collectives on model tensors: sums in rank order (reduce-scatter) and all-gathers of rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from qarl.distributed.packed import Layout

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # name up to torch 2.12


class Pending(ABC):
    """An asynchronous transfer of rows. Its inputs stay in memory until the single call of `rows`."""

    @abstractmethod
    def rows(self) -> Tensor:
        """Wait and return the rows, contiguous and in their own memory. The input tensor may be reused afterwards.

        On a GPU the current stream waits, not the host. It must be the stream that produced the input tensors.
        """


class Exchange(ABC):
    """Collectives of one run on its device. All ranks call the same ones in the same order.

    Attributes:
        rank: Rank of this process.
        count: Number of ranks.
    """

    rank: int
    count: int

    @abstractmethod
    def begin_sums(self, tensors: Sequence[Tensor], cuts: Sequence[Sequence[range]]) -> list[Pending]:
        """Start a reduce-scatter of several tensors in one message. The sum is in rank order.

        Computes ((first + second) + third) + ... in float32, so every transport gives the same bits. The tensors must
        not change until `rows` was called on all results.

        Args:
            tensors: Float32, contiguous, (N, ...) each.
            cuts: For each tensor the rows that each rank gets, in order. They cover N; some may be empty.

        Returns:
            This rank's rows of each sum.
        """

    def gather_rows(self, own: Tensor, cut: Sequence[range]) -> Tensor:
        """Blocking `begin_gathers` of one tensor into a new one."""
        return self.begin_gathers([own], [cut], [own.new_empty(cut[-1].stop, *own.shape[1:])])[0].rows()

    @abstractmethod
    def begin_gathers(
        self, own: Sequence[Tensor], cuts: Sequence[Sequence[range]], outs: Sequence[Tensor]
    ) -> list[Pending]:
        """Start an all-gather of the rows of several tensors, of any dtypes, in one message.

        Args:
            own: This rank's rows of each tensor, (len(cut[rank]), ...), contiguous. Must not change until `rows` was
                called on all results.
            cuts: For each tensor the rows of `out` that each rank fills, in order. Some may be empty; rows that belong
                to no rank are left unchanged.
            outs: Contiguous destinations (N, ...), returned by `rows`.
        """

    @abstractmethod
    def move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors to ranks and receive tensors from ranks, all contiguous, excluding this rank itself.

        The sends of one rank to another must match that rank's receives, in the same order. Waits like `Pending.rows`.
        """

    @abstractmethod
    def largest(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum of a float32 tensor over all ranks, as a new tensor on every rank.

        The tensor must not contain NaN, which backends treat differently. Infinity is allowed.
        """


class _Rows(Pending):
    """Rows that are already available."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def rows(self) -> Tensor:
        return self._rows


class SingleProcessExchange(Exchange):
    """Exchange of a single process, which holds all rows."""

    rank, count = 0, 1

    def begin_sums(self, tensors: Sequence[Tensor], cuts: Sequence[Sequence[range]]) -> list[Pending]:
        return [_Rows(tensor.clone()) for tensor in tensors]

    def begin_gathers(
        self, own: Sequence[Tensor], cuts: Sequence[Sequence[range]], outs: Sequence[Tensor]
    ) -> list[Pending]:
        for rows, (place,), out in zip(own, cuts, outs, strict=True):
            out[place.start : place.stop].copy_(rows)
        return [_Rows(out) for out in outs]

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

    def begin_sums(self, tensors: Sequence[Tensor], cuts: Sequence[Sequence[range]]) -> list[Pending]:
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
        messages = self._begin(sends, receives)
        return [_Sum(messages, some, self.rank) for some in parts]

    def begin_gathers(
        self, own: Sequence[Tensor], cuts: Sequence[Sequence[range]], outs: Sequence[Tensor]
    ) -> list[Pending]:
        for rows, cut, out in zip(own, cuts, outs, strict=True):
            assert out.is_contiguous() and len(cut) == self.count and cut[-1].stop <= len(out), (
                f"{cut} does not fill a contiguous tensor {tuple(out.shape)} for {self.count} ranks"
            )
            shape = len(cut[self.rank]), *out.shape[1:]
            assert rows.is_contiguous() and rows.dtype == out.dtype and rows.shape == shape, (
                f"{rows.dtype} {tuple(rows.shape)} are not rows {cut[self.rank]} of {out.dtype} {tuple(out.shape)}"
            )
        if not own:
            return []
        widths = [out.itemsize * math.prod(out.shape[1:]) for out in outs]
        if len(own) == 1 and (messages := self._begin_in_place(own[0], cuts[0], outs[0])) is not None:
            return [_Gathered(messages, own[0], outs[0])]
        layout = Layout(cuts, widths)
        message = layout.pack(own, self.rank)
        if layout.even:
            arrived = message.new_empty(self.count * len(message))
            messages = self._all_gather(arrived, message)
        else:
            arrived = message.new_empty(sum(layout.sizes))
            slots = arrived.split(layout.sizes)
            slots[self.rank].copy_(message)
            sends = [(other, message) for other in self._others]
            messages = self._begin(sends, [(other, slots[other]) for other in self._others])
        unpacking = _Unpacking(messages, layout, own, message, arrived, outs)
        return [_Unpacked(unpacking, out) for out in outs]

    def _begin_in_place(self, own: Tensor, cut: Sequence[range], out: Tensor) -> _Messages | None:
        """Start to gather one tensor in place; None if its rows must be moved afterwards."""
        if any(len(rows) != len(cut[0]) for rows in cut):
            places = [_bytes(out[rows.start : rows.stop]) for rows in cut]
            sends = [(other, _bytes(own)) for other in self._others]
            messages = self._begin(sends, [(other, places[other]) for other in self._others])
            places[self.rank].copy_(_bytes(own))
            return messages
        if cut[-1].stop - cut[0].start != self.count * len(own):
            return None
        return self._all_gather(_bytes(out[cut[0].start : cut[-1].stop]), _bytes(own))

    def _all_gather(self, out: Tensor, own: Tensor) -> _Messages:
        if not own.numel():
            return _Messages([])
        return _Messages([_all_gather(out, own, group=self._group, async_op=True)])

    def move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        out, into = (
            [(other, _bytes(tensor)) for other, tensor in pairs if other != self.rank] for pairs in (sends, receives)
        )
        self._begin(out, into).wait()

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

    def _begin(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> _Messages:
        """Start sends and receives of (other rank, tensor), batched into one launch on a GPU.

        Between two ranks tensors arrive in the order in which they are sent.
        """
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=other)
            for operation, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for other, tensor in pairs
            if tensor.numel()
        ]
        return _Messages(dist.batch_isend_irecv(operations) if operations else [])


class _Messages:
    """Messages in flight."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()


class _Sum(Pending):
    def __init__(self, messages: _Messages, parts: list[Tensor], rank: int) -> None:
        self._messages, self._parts, self._rank = messages, parts, rank

    def rows(self) -> Tensor:
        self._messages.wait()
        parts, self._parts = self._parts, []
        if len(parts) == 1:
            return parts[0].clone()
        total = parts[1 if self._rank == 0 else 0]  # received; the own rows are the caller's
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total.add_(part)
        return total


class _Gathered(Pending):
    def __init__(self, messages: _Messages, own: Tensor, out: Tensor) -> None:
        self._messages, self._own, self._out = messages, own, out

    def rows(self) -> Tensor:
        self._messages.wait()
        out = self._out
        del self._own, self._out  # kept alive until now for the messages that read and wrote them
        return out


class _Unpacking:
    """A message with rows of several tensors, unpacked once."""

    def __init__(
        self,
        messages: _Messages,
        layout: Layout,
        own: Sequence[Tensor],
        message: Tensor,
        arrived: Tensor,
        outs: Sequence[Tensor],
    ) -> None:
        self._messages, self._layout, self._outs = messages, layout, outs
        self._held: tuple[Sequence[Tensor], Tensor, Tensor] | None = (own, message, arrived)  # what messages use

    def wait(self) -> None:
        if self._held is not None:
            self._messages.wait()
            self._layout.unpack(self._held[-1], self._outs)
            self._held = None


class _Unpacked(Pending):
    def __init__(self, unpacking: _Unpacking, out: Tensor) -> None:
        self._unpacking, self._out = unpacking, out

    def rows(self) -> Tensor:
        self._unpacking.wait()
        return self._out


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, because backends do not support every dtype."""
    return tensor.reshape(-1).view(torch.uint8)
