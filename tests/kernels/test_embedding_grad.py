"""Gradient of an embedding table against float64, with repeated tokens and padding."""

import pytest
import torch
from pairwise import pairwise
from products import random
from qarl_kernels.token_sums import embedding_grad
from running import NEEDS_TRITON

pytestmark = NEEDS_TRITON

VOCABULARY = 23


@pytest.mark.parametrize(
    ("shape", "padding_id", "dtype"),
    pairwise([(1, 40), (50, 33), (61, 96), (9, 1100)], [-1, 0, 7], [torch.bfloat16, torch.float16]),
)
def test_every_token_gets_the_sum_of_its_rows(
    shape: tuple[int, int], padding_id: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    ids[rows // 2 :] = torch.where(torch.rand(rows - rows // 2, generator=generator) < 0.6, 7, ids[rows // 2 :])
    ids = ids.to(device)
    grad = random(rows, columns + 4, seed=1, device=device, dtype=dtype)[:, :columns]
    before = random(VOCABULARY, columns, seed=2, device=device)
    expected = before.double()
    kept = ids != padding_id
    expected.index_add_(0, ids[kept], grad[kept].double())
    results = [before.clone() for _ in range(2)]
    for into in results:
        embedding_grad(grad, ids, into, padding_id)
    # float32 sums of up to 50 terms of size 1.
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(*results)
    absent = torch.ones(VOCABULARY, dtype=torch.bool, device=device)
    absent[ids[kept]] = False
    assert torch.equal(results[0][absent], before[absent])


def test_one_token_alone_many_times(device: torch.device) -> None:
    grad = random(301, 16, seed=0, device=device, dtype=torch.bfloat16)
    into = torch.zeros(2, 16, device=device)
    embedding_grad(grad, torch.ones(301, dtype=torch.int64, device=device), into, -1)
    torch.testing.assert_close(into[1].double(), grad.double().sum(0), rtol=1e-5, atol=1e-5)
    assert not into[0].any()


def test_no_rows(device: torch.device) -> None:
    into = torch.ones(3, 8, device=device)
    grad = torch.empty(0, 8, dtype=torch.bfloat16, device=device)
    embedding_grad(grad, torch.empty(0, dtype=torch.int64, device=device), into, 0)
    assert torch.equal(into, torch.ones_like(into))
