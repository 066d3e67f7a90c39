"""Sorting (token, expert) pairs by expert, by kernel and in plain torch, against a loop."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON
from mixtures import chosen
from qarl_kernels.gather_rows import COLUMNS, rows_in_order
from qarl_kernels.moe.dispatch import SORTS, groups_of
from torch import Tensor

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]


CASES = [
    pytest.param(chosen(37, 3, 10), 10, id="some experts"),
    pytest.param(chosen(SORTS[1][1] // 2 + 3, 4, 9), 9, id="more than a program looks at"),
    pytest.param(chosen(int(SORTS[1][0]) // 4 + 3, 4, 5), 5, id="many more than a program looks at"),
    pytest.param(chosen(1, 8, 40), 40, id="one token"),
    pytest.param(chosen(9, 1, 4), 4, id="one slot"),
    pytest.param(torch.full((20, 1), 6, dtype=torch.int32), 7, id="the last expert has all"),
    pytest.param(torch.zeros(20, 1, dtype=torch.int64), 7, id="the first expert has all"),
    pytest.param(torch.zeros(5, 1, dtype=torch.int32), 1, id="one expert"),
    pytest.param(torch.empty(0, 2, dtype=torch.int32), 5, id="no token"),
    pytest.param(torch.tensor([[-7, 2], [4, 2**31 - 1]], dtype=torch.int32), 4, id="out of range"),
]


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(("experts", "count"), CASES)
def test_pairs_stand_by_expert_and_in_their_order(device, experts: Tensor, count: int, kernels: bool) -> None:
    groups = groups_of(experts.to(device), count, kernels)
    flat = experts.clamp(0, count - 1).flatten().tolist()
    order = [pair for expert in range(count) for pair, its in enumerate(flat) if its == expert]
    assert groups.order.tolist() == order
    assert groups.place[groups.order.long()].tolist() == list(range(len(flat)))
    assert groups.starts.tolist() == [sum(its < expert for its in flat) for expert in range(count + 1)]
    assert {t.dtype for t in (groups.order, groups.place, groups.starts)} == {torch.int32}
    assert (groups.experts, groups.slots, groups.rows) == (count, experts.shape[1], len(flat))


@pytest.mark.parametrize("columns", [24, COLUMNS + 8])
def test_rows_of_tokens_in_the_order_of_their_pairs(device, columns: int) -> None:
    groups = groups_of(chosen(7, 2, 5).to(device), 5)
    x = torch.arange(7 * (columns + 8), device=device).view(7, -1).to(torch.int16).view(torch.bfloat16)[:, :columns]
    found = rows_in_order(x, groups)
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.int16), x.view(torch.int16)[groups.order.long() // 2])
    assert rows_in_order(x[:0], groups_of(torch.empty(0, 2, dtype=torch.int32, device=device), 5)).shape == (0, columns)
    with pytest.raises(ValueError, match="x must have 7 rows for these groups, not 6"):
        rows_in_order(x[:6], groups)
