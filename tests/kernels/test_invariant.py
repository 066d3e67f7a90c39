"""The row-invariant float32 product: right, and the same bits for a row in every batch."""

import pytest
import torch
from qarl_kernels import invariant

BATCHES = [1, 2, 3, 5, 7, 8, 31, 33, 64, 100]
SHAPES = [(64, 96), (33, 65), (259, 64), (1536, 576), (8, 1), (1, 40)]


def _operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    return torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)


@pytest.mark.parametrize("m", [0, 1, 5, 33, 700])
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
def test_matmul_gives_a_row_the_same_bits_in_every_batch_and_position(n: int, k: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = _operands(700, n, k)
        whole = invariant.matmul(x, weight)
        for batch in BATCHES:
            for start in (0, 1, 37):
                assert torch.equal(invariant.matmul(x[start : start + batch], weight), whole[start : start + batch])
    finally:
        torch.set_num_threads(before)


def test_matmul_does_not_depend_on_the_other_rows_or_their_stride() -> None:
    x, weight = _operands(45, 48, 80)
    whole, poisoned = invariant.matmul(x, weight), torch.full_like(x, torch.nan)
    poisoned[17] = x[17]
    assert torch.equal(invariant.matmul(poisoned, weight)[17], whole[17])
    assert torch.equal(invariant.matmul(torch.stack([x, x + 1], dim=1)[:, 0], weight), whole)


def test_row_tiles_hold_the_base_tile_in_descending_order_and_no_size_whose_bits_differ(monkeypatch) -> None:
    tiles = invariant.row_tiles(48, 80, torch.get_num_threads())
    assert invariant.BASE_TILE in tiles and list(tiles) == sorted(tiles, reverse=True)
    honest, wrong = invariant._in_tiles, 64
    monkeypatch.setattr(invariant, "_in_tiles", lambda x, w, tile: honest(x, w, tile) + (1e-6 if tile == wrong else 0))
    assert wrong not in invariant.row_tiles(49, 81, torch.get_num_threads())
