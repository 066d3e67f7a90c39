"""Paged attention in plain torch: against float64, and with the same bits in prefill, chunked prefill and decode."""

import pytest
import torch
from qarl_kernels import attention
from qarl_kernels.attention import PAGE, TILE, QueryTiles, paged_attention
from torch import Tensor

HEADS = [(4, 4, 16), (4, 2, 32), (3, 1, 64), (7, 1, 16), (1, 1, 8)]  # H, H_kv, D


class Sequences:
    """Random q, k, v of some sequences, their keys and values laid into pages in a shuffled order."""

    def __init__(self, lengths: list[int], heads: int, kv_heads: int, dim: int, dtype=torch.float32, spare: int = 0):
        generator = torch.Generator().manual_seed(sum(lengths) + heads)
        self.lengths = lengths
        self.q, self.k, self.v = (
            [torch.randn(n, h, dim, generator=generator).to(dtype) for n in lengths]
            for h in (heads, kv_heads, kv_heads)
        )
        counts = [-(-n // PAGE) for n in lengths]
        order = torch.randperm(sum(counts) + spare, generator=generator).tolist()
        self.spare = [order.pop() for _ in range(spare)]
        self.pages = [[order.pop() for _ in range(count)] for count in counts]
        self.cache = tuple(torch.zeros(sum(counts) + spare, kv_heads, PAGE, dim, dtype=dtype) for _ in range(2))
        for cache, rows in zip(self.cache, (self.k, self.v), strict=True):
            for row, pages in zip(rows, self.pages, strict=True):
                for position in range(row.shape[0]):
                    cache[pages[position // PAGE], :, position % PAGE] = row[position]

    def attend(self, spans: list[tuple[int, int, int]], size: int = TILE, width: int | None = None, **kwargs) -> Tensor:
        """Outputs of spans (sequence, first position, end), packed in order, in tiles of `size` queries."""
        q = torch.cat([self.q[s][start:stop] for s, start, stop in spans])
        tiles, row = [], 0
        for s, start, stop in spans:
            for first in range(start, stop, size):
                real = min(size, stop - first)
                pages = -(-(first + real) // PAGE) if width is None else width
                tiles.append(
                    QueryTiles(
                        torch.tensor([[row + i if i < real else -1 for i in range(size)]]),
                        torch.tensor([[first + i if i < real else 0 for i in range(size)]]),
                        torch.tensor([(self.pages[s] + [self.pages[s][0]] * pages)[:pages]]),
                    )
                )
                row += real
        return paged_attention(q, *self.cache, tiles, kwargs.pop("scale", 0.3), **kwargs)

    def exact(self, s: int, scale: float = 0.3, window: int | None = None) -> Tensor:
        """softmax(q k^T * scale) v of one sequence in float64, every head on its own."""
        q, k, v = (t[s].double() for t in (self.q, self.k, self.v))
        rep = q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        for h in range(q.shape[1]):
            for i in range(q.shape[0]):
                first = 0 if window is None else max(0, i + 1 - window)
                seen = slice(first, i + 1)
                out[i, h] = (k[seen, h // rep] @ q[i, h] * scale).softmax(0) @ v[seen, h // rep]
        return out


@pytest.mark.parametrize("window", [None, 1, 20, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS[1::2])
def test_attention_is_its_formula(heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    case = Sequences([1, 5, 64, 65, 150], heads, kv_heads, dim)
    spans = [(s, 0, n) for s, n in enumerate(case.lengths)]
    expected = torch.cat([case.exact(s, window=window) for s, _, _ in spans])
    torch.testing.assert_close(case.attend(spans, window=window).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    case = Sequences([70], 4, 2, 32, dtype)
    result = case.attend([(0, 0, 70)])
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), case.exact(0), rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "threads", "window"),
    [(HEADS[1], 1, None), (HEADS[1], 1, 20), *((heads, 2, (None, 20)[i % 2]) for i, heads in enumerate(HEADS))],
)
def test_prefill_chunks_and_decode_give_the_same_bits(heads: tuple, threads: int, window: int | None) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case = Sequences([150], *heads, torch.bfloat16)
        prefill = case.attend([(0, 0, 150)], window=window)
        chunked = [case.attend([(0, a, b)], window=window) for a, b in ((0, 7), (7, 64), (64, 100), (100, 150))]
        assert torch.equal(torch.cat(chunked), prefill)
        for position in (0, 1, 62, 63, 64, 65, 127, 128, 149):
            decoded = case.attend([(0, position, position + 1)], size=1, window=window)
            assert torch.equal(decoded[0], prefill[position]), position
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1, TILE])
def test_a_sequence_has_the_same_bits_in_every_batch(size: int) -> None:
    case = Sequences([18] * 8, 4, 2, 16)
    alone = [case.attend([(s, 0, 18)], size) for s in range(8)]
    for batch in (2, 3, 5, 7, 8):
        spans = [(s, 0, 18) for s in range(8 - batch, 8)]
        assert torch.equal(case.attend(spans, size), torch.cat(alone[8 - batch :]))


def test_a_float32_cache_more_pages_and_what_hidden_slots_hold_change_no_bit() -> None:
    case = Sequences([100], 4, 2, 16, torch.bfloat16, spare=3)
    expected = case.attend([(0, 0, 100)])
    assert torch.equal(case.attend([(0, 0, 100)], width=4), expected)
    case.cache = tuple(cache.float() for cache in case.cache)
    assert torch.equal(case.attend([(0, 0, 100)]), expected)
    for cache, filled in zip(case.cache, (torch.nan, 1e30), strict=True):
        cache[case.spare] = torch.nan
        cache[case.pages[0][1], :, 100 - PAGE :] = filled
    assert torch.equal(case.attend([(0, 0, 100)]), expected)


def test_tiles_of_one_group_and_parts_of_it_have_the_bits_of_tiles_on_their_own(monkeypatch) -> None:
    case = Sequences([64] * 5, 4, 2, 16)
    rows = torch.arange(5 * 64).view(20, TILE)
    together = QueryTiles(rows, rows % 64, torch.tensor(case.pages).repeat_interleave(4, dim=0))
    expected = case.attend([(s, 0, 64) for s in range(5)])
    for most in (attention.MAX_ELEMENTS, 1):  # 1: a group is split to save memory
        monkeypatch.setattr(attention, "MAX_ELEMENTS", most)
        assert torch.equal(paged_attention(torch.cat(case.q), *case.cache, [together], 0.3), expected)
