"""Grouped products of the backward: against float64, and with the same bits in every run."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON
from mixtures import all_to, grouped, input_grad, weight_grad
from products import random, relative_error
from qarl_kernels.groups import Groups
from qarl_kernels.moe import backward
from qarl_kernels.tuning import Tile
from torch import Tensor

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

BF16 = torch.bfloat16
# (T, k, E, N, K)
SHAPES = [(40, 2, 3, 64, 64), (23, 3, 4, 72, 48), (9, 2, 4, 30, 100), (0, 2, 4, 40, 64)]
SMALL = Tile("x_first", 16, 32, 16)


def operands(groups: Groups, gathered: bool, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dy (R, N), x and a weight (E * N, K)."""
    device = groups.order.device
    rows = groups.rows // groups.slots if gathered else groups.rows
    dy = random(groups.rows, n + 16, seed=1, device=device, dtype=dtype)[:, :n]
    x = random(rows, k + 16, seed=2, device=device, dtype=dtype)[:, :k]
    return dy, x, random(groups.experts * n, k, seed=3, device=device, dtype=dtype)


@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "n", "k", "dtype"),
    [(*shape, BF16) for shape in SHAPES] + [(*SHAPES[1], torch.float16)],
)
def test_the_inputs_gradient_is_dy_times_its_experts_weight(device, tokens, slots, experts, n, k, dtype) -> None:
    groups = grouped(tokens, slots, experts, device)
    dy, _, weight = operands(groups, False, n, k, dtype)
    expected, one_rounding = input_grad(groups, dy, weight), 2**-8 if dtype == BF16 else 2**-11
    for tile in (None, SMALL) if n == 72 else (None,):
        dx = backward.grouped_input_grad(dy, weight, groups, tile=tile)
        assert dx.shape == (groups.rows, k) and (not tokens or relative_error(dx, expected) < one_rounding)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("tokens", "slots", "experts", "n", "k"), SHAPES)
def test_the_weights_gradient_is_added_for_each_expert(device, tokens, slots, experts, n, k, gathered) -> None:
    groups = grouped(tokens, slots, experts, device)
    dy, x, _ = operands(groups, gathered, n, k, BF16)
    before = random(experts * n, k, seed=4, device=device)
    expected = before.double() + weight_grad(groups, gathered, dy, x)
    for tile in (None, SMALL) if n == 72 else (None,):
        results = [before.clone() for _ in range(2)]
        for into in results:
            backward.grouped_weight_grad(dy, x, groups, gathered, into, tile)
        torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=1e-4)  # sums of up to 80 of size 1
        assert torch.equal(*results)


def test_an_expert_without_rows_keeps_its_gradient_and_spoils_none(device) -> None:
    """NaN of an unused expert, as of the one next to it, stays where it is."""
    groups = all_to(1, 70, 3, device)
    dy, x, weight = operands(groups, True, 72, 100, BF16)  # 72: the last block of dy's features ends inside a weight
    weight[:72], weight[144:] = torch.nan, torch.nan
    assert backward.grouped_input_grad(dy, weight, groups).isfinite().all()
    into = torch.full((3 * 72, 100), torch.nan, device=device)
    into[72:144] = 0.0
    backward.grouped_weight_grad(dy, x, groups, True, into)
    assert into[:72].isnan().all() and into[144:].isnan().all()
    torch.testing.assert_close(into[72:144].double(), dy.double().t() @ x.double(), rtol=1e-5, atol=1e-4)
