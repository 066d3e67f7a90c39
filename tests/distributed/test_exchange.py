"""Sums in rank order, rows of all ranks, maxima and moves: on real processes that talk through gloo, and on one alone.

Every rank makes the tensors of all ranks, and so knows what it must receive.
"""

from collections.abc import Callable
from functools import cache, reduce
from itertools import pairwise
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from qarl.distributed.exchange import Exchange, GroupExchange, SingleProcessExchange
from qarl.distributed.group import Group
from qarl.distributed.rows import cut

SHAPES = [(16, 24), (7, 5), (1, 3), (13,), (3, 4, 5), (0, 4), (130, 2)]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64)
DTYPES = [*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]
CUTS = ("rows", "blocks", "whole", "odd")


class Counted(GroupExchange):
    """Counts the bytes that it sends and receives, and the buffers that it sends."""

    sent = received = parts = 0

    def _count(self, sent: list[Tensor], received: list[Tensor]) -> None:
        self.sent += sum(tensor.nbytes for tensor in sent)
        self.received += sum(tensor.nbytes for tensor in received)

    def _begin(self, sends, receives):
        self._count([tensor for _, tensor in sends], [tensor for _, tensor in receives])
        self.parts += sum(tensor.numel() > 0 for _, tensor in sends)
        return super()._begin(sends, receives)

    def _all_gather(self, out, own):
        self._count([own] * (self.count - 1), [out[own.numel() :]])
        self.parts += own.numel() > 0
        return super()._all_gather(out, own)


def exchange_of(group: Group | None) -> Exchange:
    if group is None:
        return SingleProcessExchange()
    return Counted(group.tensors, group.rank, group.count, group.device)


def counted(exchange: Exchange, work: Callable[[Exchange], Any]) -> tuple[Any, int, int]:
    """The result of some work, and the bytes that this rank sends and receives meanwhile."""
    sent, received = getattr(exchange, "sent", 0), getattr(exchange, "received", 0)
    found = work(exchange)
    return found, getattr(exchange, "sent", 0) - sent, getattr(exchange, "received", 0) - received


def values_of(shape: tuple[int, ...], seed: int, rank: int) -> Tensor:
    """Numbers of many magnitudes, so that sums in another order have other bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))


def typed_values(shape: tuple[int, ...], seed: int, rank: int, dtype: torch.dtype) -> Tensor:
    return (values_of(shape, seed, rank) * 7).clamp(-100, 100).to(dtype)


def cuts_of(rows: int, count: int) -> list[list[range]]:
    """Even and uneven cuts, in the order of CUTS; some leave ranks without rows."""
    bounds = [min(rows, 2 * rank * rank) for rank in range(count)] + [rows]  # the first rank has none
    odd = [range(a, b) for a, b in pairwise(bounds)]
    return [cut(rows, 1, count), cut(rows, 8, count), cut(rows, 128, count), odd]


def same(found: Tensor, expected: Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    return found.shape == expected.shape and torch.equal(*flat)


def everything(group: Group | None) -> dict[str, Any]:
    """Run all checks in processes that start once. group: None for a single process."""
    exchange = exchange_of(group)
    return {work.__name__: counted(exchange, work) for work in (sums, maxima, gathers, together, moves)}


def sums(exchange: Exchange) -> int:
    """Sum many tensors in one message, several messages in flight; returns how many values depend on the order."""
    count, rank, differing, messages = exchange.count, exchange.rank, 0, []
    for number in range(len(CUTS)):
        cuts = [cuts_of(shape[0], count)[number] for shape in SHAPES]
        given = [values_of(shape, 10 * number + case, rank) for case, shape in enumerate(SHAPES)]
        messages.append((number, cuts, given, exchange.begin_sums(given, cuts)))
    for number, cuts, given, pending in reversed(messages):
        found = [one() for one in reversed(pending)][::-1]
        for case, shape in enumerate(SHAPES):
            parts = [values_of(shape, 10 * number + case, other) for other in range(count)]
            assert torch.equal(given[case], parts[rank]), "the tensor given was changed"
            given[case].fill_(torch.nan)  # may be reused
            own = slice(cuts[case][rank].start, cuts[case][rank].stop)
            assert found[case].dtype == torch.float32 and found[case].is_contiguous()
            assert torch.equal(found[case], reduce(torch.add, parts)[own]), (shape, cuts[case])
            differing += int((found[case] != reduce(torch.add, parts[::-1])[own]).sum())
    assert exchange.begin_sums([], []) == []
    return differing


def gathers(exchange: Exchange) -> int:
    """Gather one tensor at a time; returns the bytes of all tensors."""
    count, rank, size = exchange.count, exchange.rank, 0
    for case, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            whole = typed_values(shape, case, 0, dtype)
            for some in cuts_of(shape[0], count):
                own = whole[some[rank].start : some[rank].stop].clone()
                found = exchange.gather_rows(own, some)
                assert found.dtype == dtype and found.is_contiguous() and same(found, whole), (shape, dtype, some)
                assert not own.numel() or found.data_ptr() != own.data_ptr()
                memory = torch.full((2, *shape), -1.0).to(dtype)
                exchange.begin_gathers([own], [some], [memory[1]])()
                assert same(memory[1], whole), (shape, dtype, some)
                assert same(memory[0], torch.full(shape, -1.0).to(dtype))
                size += 2 * whole.nbytes
    return size


def together(exchange: Exchange) -> dict[str, list[int]]:
    """Gather many tensors in one message: [bytes of all, buffers sent] by kind of cut."""
    count, rank = exchange.count, exchange.rank
    found, pending = {}, []
    for number, kind in enumerate((*CUTS, "inner")):
        own, cuts, outs, expected = [], [], [], []
        for case, shape in enumerate(SHAPES):
            some = cuts_of(shape[0], count)[number % 4]
            if kind == "inner":  # the first of each rank's rows only
                some = [range(rows.start, min(rows.start + 1, rows.stop)) for rows in some]
            whole = typed_values(shape, case, number, DTYPES[(case + number) % len(DTYPES)])
            own.append(whole[some[rank].start : some[rank].stop].clone())
            cuts.append(some)
            outs.append(torch.zeros_like(whole))
            expected.append(torch.zeros_like(whole))
            for rows in some:
                expected[-1][rows.start : rows.stop] = whole[rows.start : rows.stop]
        parts = getattr(exchange, "parts", 0)
        pending.append((kind, outs, expected, exchange.begin_gathers(own, cuts, outs)))
        size = sum(len(rows) * out[:1].nbytes for some, out in zip(cuts, outs, strict=True) for rows in some)
        found[kind] = [size, getattr(exchange, "parts", 0) - parts]
    for kind, outs, expected, arrive in reversed(pending):
        arrive()
        assert all(map(same, outs, expected)), kind
    exchange.begin_gathers([], [], [])()
    return found


def maxima(exchange: Exchange) -> list[float]:
    given = torch.tensor([1.0, -2.0, 0.5]) * (1 - exchange.rank)
    given = torch.cat([given, torch.tensor([torch.inf if exchange.rank == 0 else 0.0])])
    kept = given.clone()
    found = exchange.largest(given)
    assert torch.equal(given, kept) and found.data_ptr() != given.data_ptr()
    assert exchange.largest(torch.zeros(0)).shape == (0,)
    strided = torch.full((2, 3), float(exchange.rank)).t()
    assert torch.equal(exchange.largest(strided), torch.full((3, 2), exchange.count - 1.0))
    return found.tolist()


def moves(exchange: Exchange) -> None:
    """Each rank sends every rank, itself among them, two tensors of sizes and dtypes of their own."""
    rank, count = exchange.rank, exchange.count

    def sent_by(source: int, other: int, which: int) -> Tensor:
        dtype = (torch.bfloat16, torch.float8_e4m3fn)[which]
        return typed_values((source + 1, other + 2), 50 + which, source, dtype)

    places = [(other, which) for other in range(count) for which in (0, 1)]
    received = [torch.full_like(sent_by(other, rank, which), 7) for other, which in places]
    sends = [(other, sent_by(rank, other, which)) for other, which in places]
    exchange.move(sends, [(other, tensor) for (other, _), tensor in zip(places, received, strict=True)])
    for (other, which), tensor in zip(places, received, strict=True):
        expected = sent_by(other, rank, which)
        assert same(tensor, torch.full_like(expected, 7) if other == rank else expected)
    exchange.move([(other, torch.zeros(0, 4)) for other in range(count)], [])


@cache
def found_on(count: int) -> list[dict[str, Any]]:
    """The results of each rank. count: 0 for a single process without a group."""
    return run_ranks(count, f"{__file__}:everything") if count else [everything(None)]


def bytes_on(count: int, work: str) -> tuple[int, int]:
    _, sent, received = zip(*(one[work] for one in found_on(count)), strict=True)
    return sum(sent), sum(received)


@pytest.mark.parametrize("count", [0, 3])
def test_sums_are_in_rank_order_and_send_each_row_once(count: int) -> None:
    differing = sum(one["sums"][0] for one in found_on(count))
    assert differing > 100 if count else differing == 0
    whole = len(CUTS) * sum(4 * values_of(shape, 0, 0).numel() for shape in SHAPES) * max(count - 1, 0)
    assert bytes_on(count, "sums") == (whole, whole)


@pytest.mark.parametrize("count", [0, 3])
def test_rows_are_gathered_from_all_ranks_and_of_many_tensors_in_one_message(count: int) -> None:
    whole = found_on(count)[0]["gathers"][0] * max(count - 1, 0)
    assert bytes_on(count, "gathers") == (whole, whole)
    of_ranks = [one["together"][0] for one in found_on(count)]
    size = sum(size for size, _ in of_ranks[0].values())
    assert 0 <= bytes_on(count, "together")[1] - size * max(count - 1, 0) <= size  # equal messages have padding
    assert all(parts in ((1, count - 1, 0) if count else (0,)) for one in of_ranks for _, parts in one.values())


def test_maxima_are_of_all_ranks() -> None:
    assert [one["maxima"][0] for one in found_on(3)] == [[1.0, 2.0, 0.5, float("inf")]] * 3


@pytest.mark.parametrize("count", [0, 3])
def test_tensors_move_from_any_rank_to_any(count: int) -> None:
    pairs = [(source, other) for source in range(count) for other in range(count) if source != other]
    size = sum(3 * (source + 1) * (other + 2) for source, other in pairs)
    assert bytes_on(count, "moves") == (size, size)
