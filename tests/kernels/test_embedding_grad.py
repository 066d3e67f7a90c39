"""Gradient of an embedding table against float64, with repeated tokens and padding."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON
from pairwise import pairwise
from products import random
from qarl_kernels.token_sums import embedding_grad

pytestmark = NEEDS_TRITON

VOCABULARY = 23


@pytest.mark.parametrize(
    ("shape", "padding_id", "dtype"), pairwise([(0, 8), (50, 33), (601, 96)], [-1, 7], [torch.bfloat16, torch.float16])
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
    # float32 sums of up to 200 terms of size 1.
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-6, atol=3e-5)
    assert torch.equal(*results)
    absent = torch.ones(VOCABULARY, dtype=torch.bool, device=device)
    absent[ids[kept]] = False
    assert torch.equal(results[0][absent], before[absent])
