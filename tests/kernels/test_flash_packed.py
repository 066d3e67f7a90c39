"""`flash.forward` and `flash.backward` on packed batches with shared prompts, against float64 with a dense mask."""

import pytest
import torch
from attention_batches import Batch, Groups, sequences
from kernel_harness import NEEDS_TRITON
from products import random, relative_error
from qarl_kernels.flash import layout as tables
from qarl_kernels.flash.backward import attention_backward
from qarl_kernels.flash.forward import attention_forward
from qarl_kernels.flash.layout import packed_layout
from torch import Tensor

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned", "small")]

# Empty continuations, prompts and continuations of one token, none at all, and ends around a block and a chunk.
GROUPS: Groups = [(70, [65, 0, 1]), (1, [3, 128]), (0, [2]), (64, []), (127, [2])]
SMALL: Groups = [(5, [9, 0, 1]), (1, [70])]
# Probabilities are rounded once, as is the result: two roundings of 2^-9 (2^-12), of one product each.
FORWARD = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Also the gradients of scores are rounded, and the output that they come from.
BACKWARD = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two blocks and work items of two tiles: merges and partial sums with few tokens."""
    monkeypatch.setattr(tables, "CHUNK", 128)
    monkeypatch.setattr(tables, "ITEM_ROWS", 256)


def _both(batch: Batch, window: int | None, grad: Tensor) -> tuple[Tensor, ...]:
    layout = packed_layout(batch.groups, batch.q.device)
    out, lse = attention_forward(batch.q, batch.k, batch.v, layout, batch.scale, window)
    dv = torch.empty_like(batch.v)
    return out, lse, *attention_backward(grad, batch.q, batch.k, batch.v, out, lse, layout, batch.scale, window, dv), dv


def _check(batch: Batch, window: int | None) -> None:
    dtype = batch.q.dtype
    grad = random(*batch.q.shape, seed=3, device=batch.q.device, dtype=dtype)
    out, lse, *grads = _both(batch, window, grad)
    inputs = batch.doubles()
    expected, expected_lse = batch.exact(window, *inputs)
    assert (out.shape, lse.shape, [grad.shape for grad in grads]) == (
        batch.q.shape,
        expected_lse.shape,
        [x.shape for x in inputs],
    )
    if not batch.groups:
        return
    assert relative_error(out, expected) < FORWARD[dtype]
    # the sum is one of rounded probabilities
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=FORWARD[dtype])
    for given, wanted in zip(grads, torch.autograd.grad(expected, inputs, grad.double()), strict=True):
        assert given.dtype == dtype and relative_error(given, wanted) < BACKWARD[dtype]


@pytest.mark.parametrize(
    ("groups", "heads", "kv_heads", "dim", "window", "dtype"),
    [
        (GROUPS, 2, 1, 64, None, torch.bfloat16),
        (SMALL, 2, 1, 64, None, torch.float16),
        *(([(150, [65, 9]), (1, [140])], 1, 1, 64, window, torch.bfloat16) for window in (3, 64, 100)),
        *(([(5, [70, 1])], *heads, None, torch.bfloat16) for heads in ((3, 1, 80), (2, 2, 128), (1, 1, 256))),
        ([], 2, 1, 64, None, torch.bfloat16),
    ],
)
def test_attention_and_its_gradients_are_those_of_float64(device, groups, heads, kv_heads, dim, window, dtype) -> None:
    _check(Batch.random(groups, heads, kv_heads, dim, device, dtype), window)


def test_partial_sums_of_a_prompt_that_many_see(device) -> None:
    groups = [(130, [100] * 5)]
    layout = packed_layout(groups, device)
    assert layout.partials == 5 and layout.cuts.shape == (2, 4)  # 630 and 502 rows see its tiles
    _check(Batch.random(groups, 1, 1, 64, device), None)


def test_a_row_has_the_same_bits_alone_and_in_a_batch(device) -> None:
    batch = Batch.random(groups := [(70, [65, 0, 1]), (0, [2])], 2, 1, 64, device)
    grad = random(*batch.q.shape, seed=3, device=device, dtype=batch.q.dtype)
    out, lse, dq, _, _ = _both(batch, None, grad)
    for rows, before in sequences(groups):
        if len(rows) == 0:
            continue
        alone = Batch([(len(rows), [])], *(t[rows] for t in (batch.q, batch.k, batch.v)), batch.scale)
        own_out, own_lse, own_dq, _, _ = _both(alone, None, grad[rows])
        own = rows[before:]
        assert torch.equal(own_out[before:], out[own]) and torch.equal(own_lse[:, before:], lse[:, own])
        assert torch.equal(own_dq[before:], dq[own])


def test_twice_the_same_bits_into_given_rows(device) -> None:
    batch = Batch.random(SMALL, 2, 1, 64, device)
    grad = random(*batch.q.shape, seed=3, device=device, dtype=batch.q.dtype)
    out, lse, *grads = _both(batch, None, grad)
    layout = packed_layout(SMALL, device)
    dv = torch.full((layout.tokens, 4, 64), torch.nan, dtype=batch.q.dtype, device=device)[:, 3:]
    strided = torch.zeros(layout.tokens, 3, 64, dtype=grad.dtype, device=device)[:, 1:]
    strided.copy_(grad)
    found = attention_backward(strided, batch.q, batch.k, batch.v, out, lse, layout, batch.scale, None, dv)
    for one, other in zip(grads, (*found, dv), strict=True):
        assert torch.equal(one, other)


def test_a_row_that_is_not_finite_spoils_only_rows_that_see_it(device) -> None:
    batch = Batch.random([(3, [4, 4])], 1, 1, 64, device)
    batch.k[5] = torch.nan
    layout = packed_layout(batch.groups, device)
    out, _ = attention_forward(batch.q, batch.k, batch.v, layout, batch.scale)
    assert out[5:7].isnan().all() and out[:5].isfinite().all() and out[7:].isfinite().all()
