"""Tables of a packed batch with shared prompts."""

from itertools import pairwise

import pytest
import torch
from attention_batches import sequences
from qarl_kernels.flash.layout import CHUNK, ITEM_ROWS, TILE, packed_layout

CPU = torch.device("cpu")
GROUPS = [(300, [1000, 0, 1]), (0, [5]), (1, []), (130, [4000, 4000]), (2, [128, 129])]


def test_positions_continue_those_of_the_prompt_and_tables_begin_where_kernels_are_compiled_for() -> None:
    layout = packed_layout(GROUPS, CPU)
    assert layout.tokens == sum(prompt + sum(own) for prompt, own in GROUPS)
    assert layout.positions.dtype == torch.int64
    for rows, before in sequences(GROUPS):
        assert layout.positions[rows[before:]].tolist() == list(range(before, len(rows)))
    for one in (layout, packed_layout([(3, [2])], CPU), packed_layout([(128, [1])], CPU)):
        for table in (one.positions, one.queries, one.items, one.cuts):
            assert table.data_ptr() % 16 == 0 or not table.numel()
    assert packed_layout([], CPU).tokens == packed_layout([(0, [0])], CPU).tokens == 0
    with pytest.raises(ValueError, match="negative length"):
        packed_layout([(3, [-1])], CPU)


def test_query_tiles_cover_every_row_once_and_find_its_keys() -> None:
    layout = packed_layout(GROUPS, CPU)
    keys = {row: rows[: i + 1] for rows, before in sequences(GROUPS) for i, row in enumerate(rows) if i >= before}
    seen = []
    for first, count, position, prompt, shared, own in layout.queries.tolist():
        assert 0 < count <= TILE
        for i in range(count):
            at = range(position + i + 1)
            assert [p + (prompt if p < shared else own - shared) for p in at] == keys[first + i]
            seen.append(first + i)
    assert sorted(seen) == list(range(layout.tokens))
    ends = (layout.queries[:, 1] + layout.queries[:, 2]).tolist()
    assert ends == sorted(ends, reverse=True)
    assert layout.long_tiles == sum(end > CHUNK for end in ends)


def test_items_cover_every_pair_of_a_key_tile_and_a_query_once() -> None:
    layout = packed_layout(GROUPS, CPU)
    last = {}  # of each key row, the last query row that sees it
    for rows, before in sequences(GROUPS):
        for i, row in enumerate(rows):
            last[row] = max(last.get(row, 0), rows[-1]) if i < before or len(rows) > before else row
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    own_end = {}
    for rows, before in sequences(GROUPS):
        own_end |= dict.fromkeys(rows[before:], rows[-1] + 1 if rows else 0)
    for row, count, position, start, end, slot, segment_end in layout.items.tolist():
        assert (
            segment_end == own_end[row]
            and position == layout.positions[row]
            and end - start <= ITEM_ROWS
            and count <= TILE
        )
        pieces.setdefault(row, []).append((start, end, slot))
    cuts = {row: (first, slots) for row, _, first, slots in layout.cuts.tolist()}
    for row, found in pieces.items():
        found.sort()
        assert found[0][0] == row and found[-1][1] == last[row] + 1
        assert all(one[1] == other[0] for one, other in pairwise(found))
        first, slots = cuts.get(row, (-1, 1))
        assert [slot for _, _, slot in found] == ([-1] if first < 0 else list(range(first, first + slots)))
    assert layout.partials == sum(slots for _, slots in cuts.values()) > 0
    rows = sorted(row + i for row, count in {tuple(item[:2]) for item in layout.items.tolist()} for i in range(count))
    assert rows == list(range(layout.tokens))
