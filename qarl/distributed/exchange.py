"""Collectives on the model's tensors: sums in the order of ranks, and the rows of all ranks in one tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from qarl.distributed.packed import Layout

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12


class Pending(ABC):
    """Rows that are under way. What they are made of stays in memory until `rows` was called, once."""

    @abstractmethod
    def rows(self) -> Tensor:
        """Wait, and return the rows, contiguous, in their own memory; the tensor given may be reused now.

        On a GPU the stream that is current waits, and the host does not: it must be the stream on which the tensors
        given were made.
        """


class Exchange(ABC):
    """Collectives of one run on its device. All ranks call the same ones in the same order.

    rank: of this process. count: of all. sent, received: bytes that went to and came from other ranks since the start,
    by kind: "gradients", "codes", or what a caller names. parts: pieces of memory that left, for one rank, or in a
    gather for all.
    """

    rank: int
    count: int

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.parts: Counter[str] = Counter()

    def begin_sum(self, tensor: Tensor, cut: Sequence[range]) -> Pending:
        """`begin_sums` of one tensor."""
        return self.begin_sums([tensor], [cut])[0]

    @abstractmethod
    def begin_sums(
        self, tensors: Sequence[Tensor], cuts: Sequence[Sequence[range]], kind: str = "gradients"
    ) -> list[Pending]:
        """Begin to add each tensor (N, ...), float32, contiguous, over all ranks, in the order of ranks: one message.

        cuts: for each tensor the rows that each rank gets, in order, which cover N; some may be empty. Gives this
        rank's rows of the sums, ((first + second) + third) + ... in float32: the same bits for every transport. The
        tensors must stay as they are until `rows` was called of all.
        """

    def gather_rows(self, own: Tensor, cut: Sequence[range], out: Tensor | None = None) -> Tensor:
        """What `begin_gather` gives."""
        return self.begin_gather(own, cut, out).rows()

    def begin_gather(
        self, own: Tensor, cut: Sequence[range], out: Tensor | None = None, kind: str = "codes"
    ) -> Pending:
        """Begin to concatenate the rows of all ranks: (N, ...) of own's dtype, any.

        own: this rank's rows (len(cut[rank]), ...), contiguous; it must stay as it is until `rows` was called. out:
        where they go, contiguous; None makes a new tensor.
        """
        out = own.new_empty(cut[-1].stop, *own.shape[1:]) if out is None else out
        return self.begin_gathers([own], [cut], [out], kind)[0]

    @abstractmethod
    def begin_gathers(
        self, own: Sequence[Tensor], cuts: Sequence[Sequence[range]], outs: Sequence[Tensor], kind: str = "codes"
    ) -> list[Pending]:
        """Begin to put the rows of all ranks where they belong in several tensors, of any dtypes: one message.

        own: of each tensor what is of this rank, (len(cut[rank]), ...), contiguous; it must stay as it is until `rows`
        was called of all. cuts: for each tensor the rows of `out` that each rank fills, in order; some may be empty,
        and rows that are no rank's stay as they are. outs: contiguous, (N, ...), given back by `rows`.
        """

    @abstractmethod
    def move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], kind: str) -> None:
        """Send tensors to ranks, and receive from ranks into tensors: contiguous, and what is for this rank left out.

        Each sends another what that one receives of it, in one order. Waits as `Pending.rows` does. kind: of the bytes.
        """

    @abstractmethod
    def largest(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over all ranks, on every rank, of a float32 tensor: a new one.

        It must be without NaN, which one backend keeps and the next one drops; infinity is as any number.
        """


class _Rows(Pending):
    """Rows that are here already."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def rows(self) -> Tensor:
        return self._rows


class AloneExchange(Exchange):
    """That of one process: its rows are all there are."""

    rank, count = 0, 1

    def begin_sums(
        self, tensors: Sequence[Tensor], cuts: Sequence[Sequence[range]], kind: str = "gradients"
    ) -> list[Pending]:
        return [_Rows(tensor.clone()) for tensor in tensors]

    def begin_gathers(
        self, own: Sequence[Tensor], cuts: Sequence[Sequence[range]], outs: Sequence[Tensor], kind: str = "codes"
    ) -> list[Pending]:
        for rows, (place,), out in zip(own, cuts, outs, strict=True):
            out[place.start : place.stop].copy_(rows)
        return [_Rows(out) for out in outs]

    def move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], kind: str) -> None:
        return

    def largest(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


class GroupExchange(Exchange):
    """That of a process group.

    Sums carry rows as they lie in memory, and so does a gather of one tensor: nothing is packed, copied or padded. Rows
    of several tensors are packed for one message, and unpacked (`qarl.distributed.packed`).

    process_group: NCCL for a GPU, gloo for the CPU. rank, count: in it. device: of the tensors.
    Sums are made here of rows that were sent, not by the backend, whose order depends on its algorithm; a rank
    receives as many bytes as by a reduce-scatter.
    """

    def __init__(self, process_group: dist.ProcessGroup, rank: int, count: int, device: torch.device) -> None:
        super().__init__()
        self.rank, self.count, self.device = rank, count, device
        self._group = process_group
        self._others = [other for other in range(count) if other != rank]

    def begin_sums(
        self, tensors: Sequence[Tensor], cuts: Sequence[Sequence[range]], kind: str = "gradients"
    ) -> list[Pending]:
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        parts: list[list[Tensor]] = []
        for tensor, cut in zip(tensors, cuts, strict=True):
            assert tensor.dtype == torch.float32, f"need float32 to sum, got {tensor.dtype}"
            rows = self._parts(tensor, cut)
            own = rows[self.rank]
            # A buffer for each rank rather than one for all: the sum, which is made in one of them, outlives the rest.
            parts.append([own if other == self.rank else torch.empty_like(own) for other in range(self.count)])
            sends += [(other, rows[other]) for other in self._others]
            receives += [(other, parts[-1][other]) for other in self._others]
        self.sent[kind] += sum(tensor.nbytes for _, tensor in sends)
        self.received[kind] += sum(tensor.nbytes for _, tensor in receives)
        messages = self._begin(sends, receives, kind)
        return [_Sum(messages, some, self.rank) for some in parts]

    def begin_gathers(
        self, own: Sequence[Tensor], cuts: Sequence[Sequence[range]], outs: Sequence[Tensor], kind: str = "codes"
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
        mine = sum(rows.nbytes for rows in own)
        self.sent[kind] += mine * (self.count - 1)
        self.received[kind] += sum(w * sum(map(len, cut)) for w, cut in zip(widths, cuts, strict=True)) - mine
        if len(own) == 1 and (messages := self._begin_in_place(own[0], cuts[0], outs[0], kind)) is not None:
            return [_Gathered(messages, own[0], outs[0])]
        layout = Layout(cuts, widths)
        message = layout.pack(own, self.rank)
        if layout.even:
            arrived = message.new_empty(self.count * len(message))
            messages = self._all_gather(arrived, message, kind)
        else:
            arrived = message.new_empty(sum(layout.sizes))
            slots = arrived.split(layout.sizes)
            slots[self.rank].copy_(message)
            sends = [(other, message) for other in self._others]
            messages = self._begin(sends, [(other, slots[other]) for other in self._others], kind)
        unpacking = _Unpacking(messages, layout, own, message, arrived, outs)
        return [_Unpacked(unpacking, out) for out in outs]

    def _begin_in_place(self, own: Tensor, cut: Sequence[range], out: Tensor, kind: str) -> _Messages | None:
        """Begin to gather one tensor as it lies in memory; None where its rows come into place only afterwards."""
        if any(len(rows) != len(cut[0]) for rows in cut):
            places = [_bytes(out[rows.start : rows.stop]) for rows in cut]
            sends = [(other, _bytes(own)) for other in self._others]
            messages = self._begin(sends, [(other, places[other]) for other in self._others], kind)
            places[self.rank].copy_(_bytes(own))
            return messages
        if cut[-1].stop - cut[0].start != self.count * len(own):
            return None
        return self._all_gather(_bytes(out[cut[0].start : cut[-1].stop]), _bytes(own), kind)

    def _all_gather(self, out: Tensor, own: Tensor, kind: str) -> _Messages:
        if not own.numel():
            return _Messages([])
        self.parts[kind] += 1
        return _Messages([_all_gather(out, own, group=self._group, async_op=True)])

    def move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], kind: str) -> None:
        out, into = (
            [(other, _bytes(tensor)) for other, tensor in pairs if other != self.rank] for pairs in (sends, receives)
        )
        self.sent[kind] += sum(tensor.nbytes for _, tensor in out)
        self.received[kind] += sum(tensor.nbytes for _, tensor in into)
        self._begin(out, into, kind).wait()

    def largest(self, tensor: Tensor) -> Tensor:
        assert tensor.dtype == torch.float32, f"need float32, got {tensor.dtype}"
        found = tensor.clone(memory_format=torch.contiguous_format)
        if found.numel():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found

    def _parts(self, tensor: Tensor, cut: Sequence[range]) -> list[Tensor]:
        """Each rank's rows of a tensor, which share its memory."""
        assert tensor.is_contiguous() and len(cut) == self.count and cut[-1].stop == len(tensor), (
            f"{cut} does not cut a contiguous tensor {tuple(tensor.shape)} for {self.count} ranks"
        )
        return [tensor[rows.start : rows.stop] for rows in cut]

    def _begin(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], kind: str
    ) -> _Messages:
        """Begin to send and receive tensors, each with the other rank; all of them are one launch on a GPU.

        Between two ranks they arrive in the order in which they are sent.
        """
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=other)
            for operation, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for other, tensor in pairs
            if tensor.numel()
        ]
        self.parts[kind] += sum(tensor.numel() > 0 for _, tensor in sends)
        return _Messages(dist.batch_isend_irecv(operations) if operations else [])


class _Messages:
    """Messages under way."""

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
        total = parts[1 if self._rank == 0 else 0]  # a received one: the own rows are the caller's
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
        del self._own, self._out  # held until now, because messages read and wrote them
        return out


class _Unpacking:
    """A message of several tensors' rows, which are put into place once."""

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
    """The memory of a contiguous tensor: backends do not know every dtype."""
    return tensor.reshape(-1).view(torch.uint8)
