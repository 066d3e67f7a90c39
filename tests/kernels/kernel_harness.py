"""Helpers to compare kernels with plain torch: marks, bitwise comparison, and independence of rows.

The fixture `poisoned` (conftest.py) poisons what kernels write to, `products.random` draws data.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from qarl_kernels.launch import INTERPRETED
from torch import Tensor

RUNNABLE = INTERPRETED or torch.cuda.is_available()
NEEDS_TRITON = pytest.mark.skipif(not RUNNABLE, reason="needs TRITON_INTERPRET=1 or a GPU")
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy names every 0 / 0 and overflow
BY = [pytest.param(True, marks=NEEDS_TRITON, id="triton"), pytest.param(False, id="torch")]
Call = Callable[..., Tensor | Sequence[Tensor | None]]


def assert_same(tensor: Tensor, expected: Tensor) -> None:
    """Check dtype, shape and values; e4m3 +0 and -0 differ, any NaN equals any other."""
    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
    tensor, expected = tensor.cpu(), expected.cpu()
    if tensor.dtype == torch.float8_e4m3fn:
        nan = expected.float().isnan()
        assert torch.equal(tensor.float().isnan(), nan)
        tensor, expected = (t.contiguous().view(torch.uint8).masked_fill(nan, 0) for t in (tensor, expected))
    assert torch.equal(tensor.isnan(), expected.isnan())
    assert torch.equal(tensor.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


def _results(call: Call, *rows: Tensor) -> list[Tensor]:
    found = call(*rows)
    return [one for one in ([found] if isinstance(found, Tensor) else found) if one is not None]


def assert_rows_are_their_own(call: Call, *given: Tensor, spoil: bool = True) -> None:
    """Check that the bits of a row's results depend neither on the other rows nor on its position.

    call: Takes tensors of R rows and returns tensors of R rows.
    spoil: Whether a row of NaN shows in its own results and in no others.
    """
    whole, count = _results(call, *given), len(given[0])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(given[0].device)

    def check(rows: slice | Tensor, *parts: Tensor) -> None:
        for found, expected in zip(_results(call, *parts), whole, strict=True):
            assert_same(found, expected[rows])

    for rows in (slice(0, 0), slice(0, 1), slice(count - 1, count), slice(1, 1 + 2 * count // 3), order):
        check(rows, *(one[rows].clone() for one in given))
    check(slice(None), *(torch.cat([one, torch.full_like(one, 7)], -1)[..., : one.shape[-1]] for one in given))
    if spoil:
        bad, spoiled = count // 2, given[0].clone()
        spoiled[bad] = torch.nan
        found, others = _results(call, spoiled, *given[1:]), torch.arange(count, device=spoiled.device) != bad
        for one, expected in zip(found, whole, strict=True):
            assert_same(one[others], expected[others])
        assert any(one.is_floating_point() and one[bad].isnan().any() for one in found), "NaN is lost"
