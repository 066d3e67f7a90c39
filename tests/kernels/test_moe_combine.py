"""Weighted sums of experts' rows per token, and their gradients: bit for bit plain torch, and against float64."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON
from mixtures import grouped
from products import random
from qarl_kernels.groups import Groups, Shared
from qarl_kernels.moe import combine, reference, shared
from torch import Tensor

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

BF16 = torch.bfloat16
SHAPES = [(13, 3, 6, 100), (3, 8, 20, 1100), (5, 1, 3, 33), (0, 2, 4, 64)]  # T, k, E, H


def inputs(groups: Groups, columns: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """dy, d, weights, the matrices' rows further apart than they are long."""
    device, tokens = groups.order.device, groups.rows // groups.slots
    dy = random(tokens, columns + 16, seed=1, device=device, dtype=dtype)[:, :columns]
    d = random(groups.rows, columns + 16, seed=2, device=device, dtype=dtype)[:, :columns]
    weights = torch.rand(tokens, groups.slots, generator=torch.Generator().manual_seed(3)).to(device)
    return dy, d, weights


def by_token(rows: Tensor, groups: Groups) -> Tensor:
    """(R, H) in sorted order -> (T, k, H) in float64."""
    result = torch.zeros(groups.rows, rows.shape[1], dtype=torch.float64, device=rows.device)
    result[groups.order.long()] = rows.double()
    return result.view(-1, groups.slots, rows.shape[1])


def shared_expert(tokens: int, columns: int, device: torch.device, dtype: torch.dtype = BF16) -> Shared:
    output = random(tokens, columns + 8, seed=4, device=device, dtype=dtype)[:, :columns]
    return Shared(output, torch.rand(tokens, generator=torch.Generator().manual_seed(5)).to(device))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("tokens", "slots", "experts", "columns"), SHAPES)
def test_a_token_is_the_weighted_sum_of_its_rows_and_the_shared_expert(
    device, tokens, slots, experts, columns, dtype
) -> None:
    groups, beside = grouped(tokens, slots, experts, device), shared_expert(tokens, columns, device, dtype)
    _, d, weights = inputs(groups, columns, dtype)
    of_slots = (by_token(d, groups) * weights.double()[:, :, None]).sum(1)
    of_shared = beside.output.double() * beside.gate.double()[:, None]
    for shared_, expected in ((None, of_slots), (beside, of_slots + of_shared)):
        result = combine.combine(d, weights, groups, shared_)
        assert result.dtype == dtype and torch.equal(result, reference.combine(d, weights, groups, shared_))
        torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-5)  # one rounding to bf16


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("tokens", "slots", "experts", "columns"), SHAPES)
def test_gradients_of_rows_and_weights(device, tokens, slots, experts, columns, in_place) -> None:
    groups = grouped(tokens, slots, experts, device)
    dy, d, weights = inputs(groups, columns)
    expected, expected_weights = reference.combine_backward(dy, d, weights, groups)
    arriving = dy.double()[:, None, :]
    torch.testing.assert_close(
        by_token(expected, groups), arriving * weights.double()[:, :, None], rtol=2**-8, atol=1e-30
    )
    exact = (arriving * by_token(d, groups)).sum(2)
    torch.testing.assert_close(expected_weights.double(), exact, rtol=1e-5, atol=1e-4)  # sums of 1,100 of size 1
    into = d.clone() if in_place else torch.empty_like(d)
    grad, grad_weights = combine.combine_backward(dy, into if in_place else d, weights, groups, into)
    assert torch.equal(grad, expected) and grad.dtype == d.dtype and grad is into
    torch.testing.assert_close(grad_weights.double(), exact, rtol=1e-5, atol=1e-4)
    again = combine.combine_backward(dy, d, weights, groups, torch.empty_like(d))
    assert torch.equal(again[1], grad_weights)


@pytest.mark.parametrize(("tokens", "slots", "experts", "columns"), SHAPES)
def test_a_gathered_inputs_gradient_is_the_sum_of_its_rows(device, tokens, slots, experts, columns) -> None:
    groups = grouped(tokens, slots, experts, device)
    added, grad, _ = inputs(groups, columns)
    for other in (None, added):
        result = combine.sum_over_slots(grad, groups, other)
        assert torch.equal(result, reference.sum_over_slots(grad, groups, other))
        expected = by_token(grad, groups).sum(1) + (0 if other is None else other.double())
        torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("tokens", "slots", "experts", "columns"), SHAPES)
def test_gradients_of_the_shared_expert_and_its_gate(device, tokens, slots, experts, columns, in_place) -> None:
    dy = random(tokens, columns + 16, seed=1, device=device, dtype=BF16)[:, :columns]
    beside = shared_expert(tokens, columns, device)
    expected, expected_logit = reference.shared_backward(dy, beside)
    gate = beside.gate.double()
    wide = dy.double() * gate[:, None]
    torch.testing.assert_close(expected.double(), wide, rtol=2**-8, atol=1e-30)
    exact = (dy.double() * beside.output.double()).sum(1) * gate * (1 - gate)
    torch.testing.assert_close(expected_logit.double(), exact, rtol=1e-5, atol=1e-4)
    grad, logit = combine.shared_backward(dy, beside, beside.output if in_place else torch.empty_like(beside.output))
    assert torch.equal(grad, expected) and (grad is beside.output) == in_place
    torch.testing.assert_close(logit.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("tokens", "columns"), [(13, 100), (3, 1100), (1, 33), (0, 64)])
def test_the_gate_of_the_shared_expert(device, tokens, columns) -> None:
    for dtype in (BF16, torch.float16):
        x = random(tokens, columns + 8, seed=6, device=device, dtype=dtype)[:, :columns]
        weight = random(1, columns, seed=7, device=device, dtype=dtype) / 8
        exact = (x.double() @ weight.double().t())[:, 0].sigmoid()
        gates = [shared.shared_gate(x, weight, kernels) for kernels in (True, False)]
        for gate in gates:
            assert gate.dtype == torch.float32 and gate.is_contiguous()
            torch.testing.assert_close(gate.double(), exact, rtol=2e-5, atol=1e-30)
        for token in range(0, tokens, 5):
            assert torch.equal(shared.shared_gate(x[token:][:1], weight, True), gates[0][token : token + 1])


def test_a_token_has_the_same_bits_in_every_batch(device) -> None:
    groups = grouped(20, 3, 5, device)
    _, d, weights = inputs(groups, 70)
    beside = shared_expert(20, 70, device)
    whole = combine.combine(d, weights, groups, beside)
    for token in (0, 11, 19):
        rows = groups.place[token * 3 : token * 3 + 3].long()
        alone = reference.groups_of(torch.arange(3, device=device).view(1, 3), 3)
        own = Shared(beside.output[token][None], beside.gate[token][None])
        assert torch.equal(combine.combine(d[rows], weights[token][None], alone, own)[0], whole[token])


def test_a_row_that_is_not_finite_spoils_only_its_token(device) -> None:
    groups = grouped(6, 2, 5, device)
    dy, d, weights = inputs(groups, 40)
    d[groups.place[5].long()] = torch.nan  # token 2, slot 1
    result = combine.combine(d, weights, groups)
    assert result[2].isnan().all() and result[[0, 1, 3, 4, 5]].isfinite().all()
    _, grad_weights = combine.combine_backward(dy, d, weights, groups, torch.empty_like(d))
    assert grad_weights.isnan().nonzero().tolist() == [[2, 1]]
