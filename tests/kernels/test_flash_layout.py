"""Tables of a packed batch with shared prompts."""

import pytest
import torch
from attention_batches import sequences
from qarl_kernels.flash.layout import CHUNK, TILE, packed_layout

CPU = torch.device("cpu")
GROUPS = [(300, [1000, 0, 1]), (0, [5]), (1, []), (2, [128, 129])]


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
