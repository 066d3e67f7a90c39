"""Exponential noise by seed and counter: the kernel is its plain-torch definition, and rows depend on nothing else."""

import pytest
import torch
from kernel_oracles import exponential_reference
from qarl_kernels.draw import exponential_
from torch import Tensor

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


def test_a_row_depends_on_its_seed_and_counter_only(device) -> None:
    seeds, counters = rows(device)
    together = exponential_(torch.empty(len(SEEDS), 777, device=device), seeds, counters)
    for row in range(len(SEEDS)):
        alone = exponential_(torch.empty(1, 777, device=device), seeds[row : row + 1], counters[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_neighbouring_seeds_and_counters_share_nothing(device) -> None:
    seeds, counters = rows(device, [7, 8, 7], [0, 0, 4])
    noise = exponential_(torch.empty(3, 4000, device=device), seeds, counters)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (noise[a] == noise[b]).float().mean() < 1e-3
        assert torch.corrcoef(noise[[a, b]])[0, 1].abs() < 0.06  # 4 / sqrt(4000)


def test_values_are_exponential_positive_and_finite() -> None:
    seeds, counters = rows(torch.device("cpu"), list(range(200)), [0] * 200)
    noise = exponential_reference(seeds, counters, 5000).double().flatten()
    assert noise.isfinite().all() and (noise > 0).all()
    ordered = noise.sort().values
    empirical = torch.arange(1, len(ordered) + 1) / len(ordered)
    assert (1 - torch.exp(-ordered) - empirical).abs().max() < 1.95 / len(ordered) ** 0.5  # Kolmogorov, 0.1 %


def test_the_definition_is_philox() -> None:
    # Random123's known answers for philox4x32-10: counter and key all zero, and all ones.
    zero = exponential_reference(torch.tensor([0]), torch.tensor([0]), 4)[0].double()
    known = torch.tensor([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], dtype=torch.float64)
    torch.testing.assert_close(torch.exp(-zero), known * 2**-32 + 2**-33, rtol=1e-6, atol=1e-7)
