"""Sampling by kernels: tokens from logits, and exponential noise by seed and counter; a row depends on nothing else."""

import pytest
import torch
from kernel_harness import assert_rows_are_their_own
from kernel_oracles import draw_reference, exponential_reference
from qarl_kernels.draw import TILE, draw, exponential_
from torch import Tensor

EDGES = [0.0, 5e-324, 2.0**-53, 1 - 2.0**-53, 1.0]
SIZES = [1, 12, TILE, TILE + 1, 3 * TILE - 5]


def random_logits(rows: int, vocabulary: int, device: torch.device, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    return (spread * torch.randn(rows, vocabulary, generator=generator)).to(device)


def uniform(count: int, device: torch.device) -> Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count)).to(device)


def drawn(logits: Tensor, points: Tensor) -> Tensor:
    return draw(logits, logits.logsumexp(-1), points)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("vocabulary", SIZES)
def test_tokens_are_those_of_float64_and_of_the_definition(device, vocabulary: int) -> None:
    logits, points = random_logits(33, vocabulary, device), uniform(33, device)
    exact = logits.double().softmax(-1).cumsum(-1)
    expected = (exact <= points[:, None] * exact[:, -1:]).sum(-1)
    found = drawn(logits, points)
    # one float32 exponential may be off by an ulp; no point lies so near to a boundary here
    assert found.tolist() == expected.tolist()
    assert found.tolist() == draw_reference(logits, logits.logsumexp(-1), points).tolist()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_rows_tokens_and_noise_are_its_own(device) -> None:
    logits, points = random_logits(9, TILE + 100, device), uniform(9, device)
    assert_rows_are_their_own(
        lambda x, points: drawn(x, points[:, 0].contiguous()), logits, points[:, None], spoil=False
    )
    state = torch.stack(rows(device), 1)

    def noise(state: Tensor) -> Tensor:
        return exponential_(torch.empty(len(state), 777, device=device), *(one.contiguous() for one in state.t()))

    assert_rows_are_their_own(noise, state, spoil=False)


@pytest.mark.parametrize("far", [-50.0, float("-inf")])
@pytest.mark.parametrize("size", [8, 2 * TILE, 9 * TILE])
def test_the_ends_of_the_unit_interval_draw_kept_tokens(device, far: float, size: int) -> None:
    logits = torch.full((len(EDGES), size), far, device=device)
    middle = size // 2  # the kept tokens are in two tiles
    logits[:, middle - 1 : middle + 2] = torch.tensor([0.0, -0.1, -0.2], device=device)
    points = torch.tensor(EDGES, dtype=torch.float64, device=device)
    assert drawn(logits, points).tolist() == [middle - 1] * 3 + [middle + 1] * 2


# --- exponential noise


SEEDS = [0, 1, 2**31 - 1, 2**62 + 12_345, 2**63 - 1]
COUNTERS = [0, 4, 2**31 + 3, 2**32 - 1, 8]


def rows(device: torch.device, seeds: list[int] = SEEDS, counters: list[int] = COUNTERS) -> tuple[Tensor, Tensor]:
    return torch.tensor(seeds, device=device), torch.tensor(counters, device=device)


@pytest.mark.parametrize("columns", [1, 3, 4, 1000, 5001])
def test_the_kernel_fills_what_the_definition_says_and_nothing_beside_it(device, columns: int) -> None:
    seeds, counters = rows(device)
    held = torch.full((len(SEEDS), columns + 7), float("nan"), device=device)
    exponential_(held[:, :columns], seeds, counters)
    # logarithms of two libraries: one unit in the last place of values up to 23
    torch.testing.assert_close(held[:, :columns], exponential_reference(seeds, counters, columns), rtol=2e-6, atol=2e-7)
    assert held[:, columns:].isnan().all()


def test_the_definition_is_philox() -> None:
    # Random123's known answers for philox4x32-10: counter and key all zero, and all ones.
    zero = exponential_reference(torch.tensor([0]), torch.tensor([0]), 4)[0].double()
    known = torch.tensor([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], dtype=torch.float64)
    torch.testing.assert_close(torch.exp(-zero), known * 2**-32 + 2**-33, rtol=1e-6, atol=1e-7)
