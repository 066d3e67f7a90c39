"""What the ranks of test_exchange.py do; every rank makes all ranks' tensors, and so knows what it must receive."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qarl.distributed.exchange import Exchange, GroupExchange, SingleProcessExchange
from qarl.distributed.group import Group
from qarl.distributed.rows import cut

SHAPES = [(16, 24), (7, 5), (1, 3), (13,), (3, 4, 5), (0, 4), (130, 2)]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float64,
    torch.bool,
]


def exchange_of(group: Group | None) -> Exchange:
    return (
        SingleProcessExchange()
        if group is None
        else GroupExchange(group.tensors, group.rank, group.count, group.device)
    )


def values_of(shape: tuple[int, ...], seed: int, rank: int) -> Tensor:
    """Numbers of many magnitudes, so that every order of their sums has other bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def cuts_of(rows: int, count: int) -> list[list[range]]:
    """Even and uneven cuts, some of which leave ranks without rows."""
    bounds = [min(rows, 2 * rank * rank) for rank in range(count)] + [rows]  # the first rank has none
    odd = [range(a, b) for a, b in pairwise(bounds)]
    return [cut(rows, 1, count), cut(rows, 8, count), cut(rows, 128, count), odd]


def everything(group: Group | None) -> dict[str, Any]:
    """All of the below, in processes that start once; None: alone."""
    exchange = exchange_of(group)
    return {
        "differing": sums(exchange),
        "maxima": maxima(exchange),
        "several": several(exchange),
        "gathers": gathers(exchange),
        "together": together(exchange),
        "moves": moves(exchange),
    }


def sums(exchange: Exchange) -> int:
    """How many elements another order would have given other bits."""
    count, rank, differing = exchange.count, exchange.rank, 0
    for case, shape in enumerate(SHAPES):
        for some in cuts_of(shape[0], count):
            parts = [values_of(shape, case, other) for other in range(count)]
            given = parts[rank].clone()
            found = exchange.begin_sums([given], [some])[0].rows()
            assert torch.equal(given, parts[rank]), "the tensor given was changed"
            given.fill_(torch.nan)  # may be reused
            own = some[rank]
            expected = in_order(parts)[own.start : own.stop]
            assert found.dtype == torch.float32 and found.is_contiguous() and torch.equal(found, expected), (
                shape,
                some,
            )
            wide = torch.stack(parts).double()
            error = (found.double() - wide.sum(0)[own.start : own.stop]).abs()
            bound = count * 2**-24 * wide.abs().sum(0)[own.start : own.stop]
            assert (error <= bound).all(), (shape, some)
            differing += int((found != in_order(parts[::-1])[own.start : own.stop]).sum())
    return differing


def several(exchange: Exchange) -> dict[str, dict[str, int]]:
    """Many tensors in one message, several messages under way, waited for in another order."""
    count, rank = exchange.count, exchange.rank
    messages = []
    for seed in (7, 8, 9):
        cuts = [cut(shape[0], 1 + seed % 3, count) for shape in SHAPES]
        given = [values_of(shape, 10 * seed + case, rank) for case, shape in enumerate(SHAPES)]
        messages.append((seed, cuts, exchange.begin_sums(given, cuts, f"seed {seed}")))
    for seed, cuts, pending in reversed(messages):
        for case in reversed(range(len(SHAPES))):
            parts = [values_of(SHAPES[case], 10 * seed + case, other) for other in range(count)]
            own = cuts[case][rank]
            assert torch.equal(pending[case].rows(), in_order(parts)[own.start : own.stop]), (seed, case)
    assert exchange.begin_sums([], []) == []
    return {"sent": dict(exchange.sent), "received": dict(exchange.received)}


def gathers(exchange: Exchange) -> dict[str, dict[str, int]]:
    count, rank = exchange.count, exchange.rank
    for case, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            whole = (values_of(shape, case, 0) * 7).clamp(-100, 100).to(dtype)
            for some in cuts_of(shape[0], count):
                own = whole[some[rank].start : some[rank].stop].clone()
                found = exchange.gather_rows(own, some)
                assert found.dtype == dtype and found.is_contiguous()
                assert not own.numel() or found.data_ptr() != own.data_ptr()
                assert same(found, whole), (shape, dtype, some)
                memory = torch.full((2, *shape), -1.0).to(dtype)
                pending = exchange.begin_gather(own, some, memory[1])
                found = pending.rows()
                assert found.data_ptr() == memory[1].data_ptr() and same(memory[1], whole), (shape, dtype, some)
                assert same(memory[0], torch.full(shape, -1.0).to(dtype))
    return {"sent": dict(exchange.sent), "received": dict(exchange.received)}


def together(exchange: Exchange) -> dict[str, list[int]]:
    """Many tensors in one message: [bytes received, those of all, pieces of memory] of each kind of cut."""
    count, rank = exchange.count, exchange.rank
    found, pending = {}, []
    for number, kind in enumerate(("rows", "blocks", "whole", "odd", "inner")):
        own, cuts, outs, expected = [], [], [], []
        for case, shape in enumerate(SHAPES):
            some = cuts_of(shape[0], count)[number % 4]
            if kind == "inner":  # the first of each rank's rows alone
                some = [range(rows.start, min(rows.start + 1, rows.stop)) for rows in some]
            dtype = DTYPES[(case + number) % len(DTYPES)]
            whole = (values_of(shape, case, number) * 7).clamp(-100, 100).to(dtype)
            own.append(whole[some[rank].start : some[rank].stop].clone())
            cuts.append(some)
            outs.append(torch.zeros_like(whole))
            expected.append(torch.zeros_like(whole))
            for rows in some:
                expected[-1][rows.start : rows.stop] = whole[rows.start : rows.stop]
        pending.append((kind, outs, expected, exchange.begin_gathers(own, cuts, outs, kind)))
        size = sum(len(rows) * out[:1].nbytes for some, out in zip(cuts, outs, strict=True) for rows in some)
        found[kind] = [exchange.received[kind], size, exchange.parts[kind]]
    for kind, outs, expected, arriving in reversed(pending):
        for out, right, some in list(zip(outs, expected, arriving, strict=True))[::-1]:
            assert some.rows() is out and same(out, right), kind
    assert exchange.begin_gathers([], [], []) == []
    return found


def same(found: Tensor, expected: Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    return found.shape == expected.shape and torch.equal(*flat)


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


def moves(exchange: Exchange) -> dict[str, int]:
    """Each rank sends every rank, itself among them, two tensors of sizes and dtypes of their own."""
    rank, count = exchange.rank, exchange.count

    def sent_by(source: int, other: int, which: int) -> Tensor:
        dtype = (torch.bfloat16, torch.float8_e4m3fn)[which]
        return values_of((source + 1, other + 2), 50 + which, source).clamp(-100, 100).to(dtype)

    before = dict(exchange.sent)
    received = [torch.full_like(sent_by(other, rank, which), 7) for other in range(count) for which in (0, 1)]
    places = [other for other in range(count) for _ in (0, 1)]
    exchange.move(
        [(other, sent_by(rank, other, which)) for other in range(count) for which in (0, 1)],
        list(zip(places, received, strict=True)),
        "moves",
    )
    for place, other in enumerate(places):
        expected = sent_by(other, rank, place % 2)
        assert same(received[place], torch.full_like(expected, 7) if other == rank else expected)
    exchange.move([(other, torch.zeros(0, 4)) for other in range(count)], [], "nothing")
    assert exchange.sent.get("nothing", 0) == 0 and before.items() <= exchange.sent.items()
    return {"sent": exchange.sent["moves"], "received": exchange.received["moves"]}
