"""Grouped products: the kernel and plain torch against float64; rows have the bits of an expert's own product."""

from __future__ import annotations

import pytest
import torch
from mixtures import all_to, grouped, parts
from products import random, relative_error
from qarl_kernels import gemm
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.moe.groups import Groups
from qarl_kernels.tuning import Tile
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 or a GPU"),
    pytest.mark.usefixtures("poisoned"),
]

# (T, k, E, N, K): whole tiles, ragged, K too ragged for the tensor memory accelerator, one token
SHAPES = [(40, 2, 3, 64, 128), (19, 3, 4, 72, 144), (11, 2, 3, 30, 100), (1, 4, 9, 40, 72)]
TILES = [Tile("x_first", 64, 64, 64), Tile("w_first", 16, 64, 128), Tile("w_first", 64, 64, 64)]
ONE_ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def operands(groups: Groups, gathered: bool, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    device = groups.order.device
    rows = groups.rows // groups.slots if gathered else groups.rows
    x = random(rows, k + 16, seed=1, device=device, dtype=dtype)[:, :k]
    return x, random(groups.experts * n, k, seed=2, device=device, dtype=dtype)


def rows_of(x: Tensor, gathered: bool, rows: slice, tokens: Tensor) -> Tensor:
    return x[tokens] if gathered else x[rows]


@pytest.mark.parametrize(("gathered", "dtype"), [(False, torch.float16), (True, torch.bfloat16)])
@pytest.mark.parametrize(("tokens", "slots", "experts", "n", "k"), SHAPES)
def test_each_row_is_multiplied_with_its_experts_weight(device, tokens, slots, experts, n, k, gathered, dtype) -> None:
    groups = grouped(tokens, slots, experts, device)
    x, weight = operands(groups, gathered, n, k, dtype)
    expected = torch.zeros(groups.rows, n, device=device, dtype=torch.float64)
    for expert, rows, its in parts(groups):
        expected[rows] = rows_of(x, gathered, rows, its).double() @ weight[expert * n : (expert + 1) * n].double().t()
    assert relative_error(gemm.dense(x, weight, groups=groups, gathered=gathered), expected) < ONE_ROUNDING[dtype]


# Rows that no vector can be loaded from are multiplied on one tile, whatever was asked for.
@pytest.mark.parametrize(
    ("shape", "tile"),
    [(0, TILES[0]), (0, TILES[1]), (1, TILES[0]), (1, TILES[1]), (1, TILES[2]), (2, TILES[1]), (3, TILES[1])],
    ids=lambda value: str(value) if isinstance(value, int) else f"{value.way} {value.block_m}",
)
def test_a_row_has_the_bits_of_its_experts_own_product(device, shape, tile) -> None:
    tokens, slots, experts, n, k = SHAPES[shape]
    groups = grouped(tokens, slots, experts, device)
    for gathered in (False, True):
        x, weight = operands(groups, gathered, n, k, torch.bfloat16)
        result = gemm.dense(x, weight, groups=groups, gathered=gathered, tile=tile)
        for expert, rows, its in parts(groups):
            own = rows_of(x, gathered, rows, its)
            expected = torch.full((own.shape[0], n), torch.nan, dtype=x.dtype, device=device)
            gemm.run(own, weight[expert * n : (expert + 1) * n], None, None, None, expected, tile)
            assert torch.equal(result[rows], expected), expert


def test_tiles_of_the_table_of_defaults_agree_with_gemm(device) -> None:
    """What is chosen for few rows and for many, against what `gemm` chooses for a row."""
    weight = random(3 * 64, 128, seed=2, device=device, dtype=torch.bfloat16)
    for tokens in (5, 70, 260):
        groups = grouped(tokens, 1, 3, device)
        x = random(tokens, 128, seed=1, device=device, dtype=torch.bfloat16)
        result = gemm.dense(x, weight, groups=groups, gathered=True)
        for expert, rows, its in parts(groups):
            for row, token in list(zip(range(rows.start, rows.stop), its, strict=True))[:2]:
                alone = gemm.dense(x[token][None], weight[expert * 64 : (expert + 1) * 64])
                assert torch.equal(result[row], alone[0])


@pytest.mark.parametrize("expert", [0, 4])
def test_one_expert_may_have_every_row(device, expert: int) -> None:
    groups = all_to(expert, 150, 5, device)
    x, weight = operands(groups, True, 40, 72, torch.bfloat16)
    expected = x.double() @ weight[expert * 40 : (expert + 1) * 40].double().t()
    assert relative_error(gemm.dense(x, weight, groups=groups, gathered=True), expected) < ONE_ROUNDING[x.dtype]


@pytest.mark.parametrize("tile", TILES[:2], ids=lambda tile: tile.way)
def test_what_is_not_finite_stays_in_its_row_and_its_expert(device, tile) -> None:
    groups = grouped(30, 2, 5, device)
    x, weight = operands(groups, True, 40, 72, torch.bfloat16)
    clean = gemm.dense(x, weight, groups=groups, gathered=True, tile=tile)
    x[4, 3] = torch.nan
    weight[2 * 40 : 3 * 40] = torch.nan
    result = gemm.dense(x, weight, groups=groups, gathered=True, tile=tile)
    spoiled = (groups.order // 2 == 4).clone()
    spoiled[groups.starts[2] : groups.starts[3]] = True
    assert 0 < spoiled.sum() < groups.rows
    assert result[spoiled].isnan().all() and torch.equal(result[~spoiled], clean[~spoiled])


def test_out_is_filled_and_nothing_beside_it(device) -> None:
    groups = grouped(20, 2, 4, device)
    x, weight = operands(groups, False, 40, 64, torch.bfloat16)
    wide = torch.full((groups.rows, 50), 7.0, device=device, dtype=x.dtype)
    assert gemm.dense(x, weight, groups=groups, gathered=False, out=wide[:, :40]).data_ptr() == wide.data_ptr()
    assert (
        torch.equal(wide[:, :40], gemm.dense(x, weight, groups=groups, gathered=False)) and (wide[:, 40:] == 7.0).all()
    )


def test_no_tokens(device) -> None:
    groups = grouped(0, 2, 4, device)
    for gathered in (False, True):
        x, weight = operands(groups, gathered, 40, 64, torch.bfloat16)
        assert gemm.dense(x, weight, groups=groups, gathered=gathered).shape == (0, 40)


def test_errors_name_what_is_wrong(device) -> None:
    groups = grouped(4, 2, 3, device)
    x, weight = operands(groups, True, 8, 16, torch.bfloat16)
    for x_, weight_, gathered, message in (
        (x.float(), weight, True, "dense needs bf16 or fp16 operands of one dtype"),
        (x, weight.half(), True, "not torch.bfloat16 and torch.float16"),
        (x, weight, False, "x has 4 rows, but these groups need 8, one per sorted pair"),
        (x, weight[:-1], True, "a weight of 23 rows is not that of 3 experts"),
        (x[:, :8], weight, True, "x has 8 features and the weight 16"),
    ):
        with pytest.raises(ValueError, match=message):
            gemm.dense(x_, weight_, groups=groups, gathered=gathered)
    with pytest.raises(ValueError, match="grouped products take no bias"):
        gemm.dense(x, weight, x[0], groups=groups, gathered=True)
