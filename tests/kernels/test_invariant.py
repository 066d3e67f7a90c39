"""The row-invariant float32 product: right, and the same bits for a row in every batch."""

import pytest
import torch
from kernel_harness import assert_rows_are_their_own
from qarl_kernels import invariant

SHAPES = [(33, 65), (259, 64), (8, 1), (1, 40)]


def _operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    return torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)


@pytest.mark.parametrize("m", [0, 5, 700])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matmul_is_the_product_to_float32_accuracy(m: int, n: int, k: int) -> None:
    x, weight = _operands(m, n, k)
    expected = x.double() @ weight.double().t()
    # the bound of any order of summation: K roundings of 2^-24, on the sum of magnitudes
    bound = (x.abs() @ weight.abs().t()).double() * (k + 1) * 2**-23
    result = invariant.matmul(x, weight)
    assert result.dtype == torch.float32 and result.shape == (m, n)
    assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_rows_bits_are_its_own(n: int, k: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = _operands(700, n, k)
        assert_rows_are_their_own(lambda x: invariant.matmul(x, weight), x)
        for rows in (2, 5, 33, 64):
            assert torch.equal(invariant.matmul(x[37 : 37 + rows], weight), invariant.matmul(x, weight)[37 : 37 + rows])
    finally:
        torch.set_num_threads(before)


def test_row_tiles_hold_the_base_tile_in_descending_order_and_no_size_whose_bits_differ(monkeypatch) -> None:
    tiles = invariant.row_tiles(48, 80, torch.get_num_threads())
    assert invariant.BASE_TILE in tiles and list(tiles) == sorted(tiles, reverse=True)
    honest, wrong = invariant._in_tiles, 64
    monkeypatch.setattr(invariant, "_in_tiles", lambda x, w, tile: honest(x, w, tile) + (1e-6 if tile == wrong else 0))
    assert wrong not in invariant.row_tiles(49, 81, torch.get_num_threads())
