"""`flash.paged`: the packed forward's bits from a paged cache, in prefill, chunked prefill and decode."""

import pytest
import torch
from attention_batches import Batch
from kernel_harness import NEEDS_TRITON
from kernel_oracles import to_cache
from products import random, relative_error
from qarl_kernels.flash import decode
from qarl_kernels.flash import layout as tables
from qarl_kernels.flash.forward import attention_forward
from qarl_kernels.flash.layout import packed_layout
from qarl_kernels.flash.paged import decode_attention, paged_attention, paged_layout
from qarl_kernels.flash.pairs import from_cache, paired
from torch import Tensor

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned", "small")]

LENGTHS = [200, 1, 65]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two blocks: merges with few tokens."""
    monkeypatch.setattr(tables, "CHUNK", 128)


class Paged:
    """Sequences without prompts, packed, and their keys and values in pages in a shuffled order among NaN."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        page: int,
        device: torch.device,
        contiguous: bool = True,
        dtype=torch.bfloat16,
        held: torch.dtype | None = None,
    ) -> None:
        """held: float8_e4m3fn, which keys and values are rounded to, for a cache of it; None: their own dtype."""
        self.batch = Batch.random([(n, []) for n in LENGTHS], heads, kv_heads, dim, device, dtype)
        if held is not None:
            for rows in (self.batch.k, self.batch.v):
                rows.copy_(rows.float().to(held))
        counts = [-(-n // page) for n in LENGTHS]
        order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(4)).tolist()
        self.pages = [[order.pop() for _ in range(count)] for count in counts]
        self.first = [0, 200, 201]
        self.cache = []
        for rows in (self.batch.k, self.batch.v):
            cache = torch.full((sum(counts) + 1, page, kv_heads, dim), torch.nan, dtype=dtype, device=device)
            for s, length in enumerate(LENGTHS):
                for position in range(length):
                    cache[self.pages[s][position // page], position % page] = rows[self.first[s] + position]
            cache = (cache if held is None else to_cache(cache.to(held))).transpose(1, 2)
            self.cache.append(cache.contiguous() if contiguous else cache)

    def packed(self, window: int | None = None) -> Tensor:
        batch = self.batch
        layout = packed_layout(batch.groups, batch.q.device)
        return attention_forward(batch.q, batch.k, batch.v, layout, batch.scale, window)[0]

    def attend(self, spans: list[tuple[int, int, int]], window: int | None = None) -> tuple[Tensor, list[int]]:
        """Outputs of spans (sequence, first position, tokens), and the packed rows that they are."""
        rows = [self.first[s] + position + i for s, position, count in spans for i in range(count)]
        starts = [sum(count for _, _, count in spans[:i]) for i in range(len(spans))]
        q = self.batch.q[rows]
        layout, _ = paged_layout(
            starts,
            [count for _, _, count in spans],
            [position for _, position, _ in spans],
            [self.pages[s] for s, _, _ in spans],
            q.device,
        )
        return paged_attention(q, *self.cache, layout, self.batch.scale, window), rows


@pytest.mark.parametrize(
    ("page", "contiguous", "window", "held"),
    [(16, True, None, None), (64, False, 70, None), (128, False, 70, torch.float8_e4m3fn)],
)
def test_prefill_chunked_prefill_and_decode_give_the_packed_bits(device, page, contiguous, window, held) -> None:
    paged = Paged(2, 1, 64, page, device, contiguous, held=held)
    packed = paged.packed(window)
    assert relative_error(packed, paged.batch.exact(window, *paged.batch.doubles())[0]) < 2**-8
    # whole sequences; pieces that end around a block and a chunk; single tokens beside them
    for spans in (
        [(s, 0, length) for s, length in enumerate(LENGTHS)],
        [(0, 0, 63), (2, 60, 5), (0, 63, 66), (0, 129, 71)],
        [(0, 199, 1), (1, 0, 1), (2, 64, 1), (0, 127, 1), (0, 128, 1), (0, 63, 1)],
        [(2, 63, 1), (0, 190, 10), (0, 64, 1)],
    ):
        out, rows = paged.attend(spans, window)
        assert torch.equal(out, packed[rows]), spans


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "held"),
    [
        (6, 2, 64, torch.bfloat16, None),
        (8, 1, 96, torch.float16, torch.float8_e4m3fn),
        (20, 1, 64, torch.float16, torch.float8_e4m3fn),
    ],
)
def test_decode_of_grouped_heads(device, heads, kv_heads, dim, dtype, held) -> None:
    paged = Paged(heads, kv_heads, dim, 32, device, dtype=dtype, held=held)
    out, rows = paged.attend([(0, 199, 1), (1, 0, 1), (2, 64, 1)])
    exact = paged.batch.exact(None, *paged.batch.doubles())[0][rows]
    assert relative_error(out, exact) < 2**-8
    assert torch.equal(out, paged.packed()[rows])
    alone, rows = paged.attend([(2, 64, 1)])
    assert torch.equal(alone, out[2:])


@pytest.mark.parametrize(  # one program a sequence; two for four chunks; one a chunk
    ("programs", "window", "held"), [(0, None, None), (8, 70, None), (528, 70, torch.float8_e4m3fn)]
)
def test_decode_from_tables_on_the_device(device, monkeypatch, programs, window, held) -> None:
    monkeypatch.setattr(decode, "PROGRAMS", programs)
    paged = Paged(2, 1, 64, 16, device, held=held)
    table = torch.full((4, 13), 1_000_000, dtype=torch.int32)
    for line, pages in zip(table, paged.pages, strict=False):
        line[: len(pages)] = torch.tensor(pages)
    lengths = torch.tensor([*LENGTHS, 0], dtype=torch.int32)
    q = torch.cat([paged.batch.q[[199, 200, 265]], random(1, 2, 64, seed=9, device=device, dtype=torch.bfloat16)])
    out = decode_attention(q, *paged.cache, table.to(device), lengths.to(device), paged.batch.scale, window, 500)
    assert torch.equal(out[:3], paged.packed(window)[[199, 200, 265]])
    assert out[3].eq(0).all()


def test_pairs_are_features_half_a_head_apart() -> None:
    rows = torch.arange(3 * 64, dtype=torch.uint8).reshape(3, 64).view(torch.float8_e4m3fn)
    held = to_cache(rows)
    assert paired(64) and held.shape == rows.shape and held.dtype == rows.dtype
    assert held.view(torch.uint8)[1, :6].tolist() == [64, 96, 65, 97, 66, 98]
    assert torch.equal(from_cache(held).view(torch.uint8), rows.view(torch.uint8))
    odd = torch.arange(160, dtype=torch.uint8).reshape(2, 80).view(torch.float8_e4m3fn)
    assert not paired(80) and not paired(8)
    for same in (to_cache(odd), from_cache(odd)):
        assert torch.equal(same.view(torch.uint8), odd.view(torch.uint8))
