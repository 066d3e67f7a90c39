"""Products with experts' weights: every row has the bits of the product with its expert's own weight."""

from __future__ import annotations

import pytest
import torch
from qarl_formats.prepared import PreparedWeight, prepare
from qarl_formats.quantize import quantize_weight
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.stacked import Form, stack
from qarl_kernels.moe.groups import Groups
from torch import Tensor

EXPERTS, SLOTS = 5, 2
NAMES = [*scheme_names(), "w4a16 asymmetric", "w4a8 channel"]


def groups_of(experts: Tensor, count: int) -> Groups:
    """experts (T, k): the plain meaning of `Groups`."""
    flat = experts.flatten()
    order = flat.argsort(stable=True).int()
    starts = torch.zeros(count + 1, dtype=torch.int32)
    starts[1:] = flat.bincount(minlength=count).cumsum(0)
    return Groups(count, experts.shape[1], order, order.argsort().int(), starts)


def random_groups(tokens: int) -> Groups:
    """Expert 1 is chosen by none, expert 3 by all."""
    generator = torch.Generator().manual_seed(tokens)
    others = torch.tensor([0, 2, 4])[torch.randint(0, 3, (tokens,), generator=generator)]
    return groups_of(torch.stack([others, torch.full((tokens,), 3)], 1).sort(1).values, EXPERTS)


def experts_of(name: str, n: int, k: int, kernels: bool = False) -> tuple[list[Form], PreparedWeight]:
    """The experts' own weights (n, k), quantized as a stack of them is, and the stack, prepared for bfloat16."""
    scheme_name, _, kind = name.partition(" ")
    grouped = bool(make_scheme(scheme_name).group_sizes)
    scheme = make_scheme(scheme_name, (-1 if kind == "channel" else 32) if grouped else None, kind != "asymmetric")
    masters = torch.randn(EXPERTS, n, k, generator=torch.Generator().manual_seed(3))
    if scheme.quantized:
        shared = scheme.shared(masters)
        weights: list[Form] = [quantize_weight(master, scheme, "w", kernels, shared) for master in masters]
    else:
        weights = list(masters.bfloat16())
    return weights, prepare(stack(weights), torch.bfloat16, kernels)


def one_by_one(weights: list[Form], x: Tensor, groups: Groups, gathered: bool, kernels: bool = False) -> Tensor:
    """What `PreparedWeight.grouped` promises: each row by itself, with its expert's own weight."""
    prepared = [prepare(weight, torch.bfloat16, kernels) for weight in weights]
    rows, starts = [], groups.starts.tolist()
    for expert in range(groups.experts):
        for row in range(starts[expert], starts[expert + 1]):
            source = int(groups.order[row]) // groups.slots if gathered else row
            rows.append(prepared[expert](x[source : source + 1], None))
    return torch.cat(rows)


def rows_for(groups: Groups, k: int, gathered: bool) -> Tensor:
    rows = groups.rows // groups.slots if gathered else groups.rows
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(9)).bfloat16()


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_bits_of_its_experts_own_product(name: str, gathered: bool) -> None:
    groups = random_groups(23)
    weights, prepared = experts_of(name, 128 if name == "fp8_block" else 40, 160)
    x = rows_for(groups, 160, gathered)
    y = prepared.grouped(x, groups, gathered)
    assert y.dtype == torch.bfloat16 and torch.equal(y, one_by_one(weights, x, groups, gathered))


def test_no_tokens_give_no_rows() -> None:
    _, prepared = experts_of("w8a8", 40, 96)
    assert prepared.grouped(torch.zeros(0, 96).bfloat16(), random_groups(0), True).shape == (0, 40)


def test_what_does_not_fit_is_refused() -> None:
    groups = random_groups(3)
    _, prepared = experts_of("w8a8", 40, 96)
    with pytest.raises(ValueError, match=r"x is \[6, 96\], but the experts take \(3, 96\)"):
        prepared.grouped(torch.zeros(6, 96).bfloat16(), groups, True)
    with pytest.raises(ValueError, match="200 rows are not the weights of 7 experts"):
        prepared.grouped(torch.zeros(3, 96).bfloat16(), groups_of(torch.zeros(3, 2, dtype=torch.int64), 7), True)
    with pytest.raises(ValueError, match="40 output features would share stored values of fp8_block, which span 128"):
        experts_of("fp8_block", 40, 96)[1].grouped(torch.zeros(3, 96).bfloat16(), groups, True)
