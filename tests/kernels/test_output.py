"""Every product fills a matrix that it is given: the same bits as in a new one, and nothing around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from nvfp4_products import Nvfp4
from products import Int4, integers, random
from qarl_kernels import fp8_block, gemm, nvfp4a16, w4a8, w4a16
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.tuning import Tile
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 or a GPU"),
    pytest.mark.usefixtures("poisoned"),
]

N, K = 40, 128
BF16 = torch.bfloat16
FAMILIES = ("dense", "w8a8", "fp8", "fp8_block", "w4a16", "w4a16_untiled", "w4a8", "nvfp4a16")
Product = Callable[[Tensor | None], Tensor]


def product(family: str, m: int, device: torch.device) -> Product:
    """A product of m rows in bf16, as a function of `out`."""
    x = random(m, K, seed=1, device=device, dtype=BF16)
    s_x = random(m, 1, seed=2, device=device).abs()
    int8, e4m3 = integers(-127, 127, m, K, seed=3, device=device), x.to(torch.float8_e4m3fn)
    int4 = Int4.random(N, K, 32, device=device)
    codes8, s_w = integers(-127, 127, N, K, seed=4, device=device), random(N, 1, seed=5, device=device).abs()
    weight = random(N, K, seed=6, device=device, dtype=BF16)
    code = weight.to(torch.float8_e4m3fn)
    fp4 = Nvfp4.random(N, K, device=device)
    packed, meta = int4.packed(), int4.meta(BF16)
    tiled = None if family == "w4a16_untiled" else int4.tiled()
    return {
        "dense": lambda out: gemm.dense(x, weight, out=out),
        "w8a8": lambda out: gemm.scaled(int8, s_x, codes8, s_w, None, BF16, out),
        "fp8": lambda out: gemm.scaled(e4m3, s_x, code, s_w, None, BF16, out),
        "fp8_block": lambda out: fp8_block.fp8_block(e4m3, s_x, code, s_w[:1], None, BF16, out),
        "w4a16": lambda out: w4a16.w4a16(x, packed, int4.scale, None, tiled, meta, out=out),
        "w4a16_untiled": lambda out: w4a16.w4a16(x, packed, int4.scale, None, tiled, meta, out=out),
        "w4a8": lambda out: w4a8.w4a8(int8, s_x, int4.tiled(), int4.meta_int8(), K, N, None, BF16, out=out),
        "nvfp4a16": lambda out: nvfp4a16.nvfp4a16(x, *fp4.stored(), *fp4.tiled(), out=out),
    }[family]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("m", [0, 1, 70])
@pytest.mark.parametrize("first", [8, 3])  # whole vectors before it in a row, and not
def test_columns_of_a_wider_matrix_are_filled_and_nothing_else(device, family, m, first) -> None:
    call = product(family, m, device)
    wider = torch.full((m, N + 24), 7.0, dtype=BF16, device=device)
    out = wider[:, first : first + N]
    result = call(out)
    assert result.data_ptr() == out.data_ptr() and result.shape == (m, N)
    assert torch.equal(out, call(None))
    assert (wider[:, :first] == 7).all() and (wider[:, first + N :] == 7).all()


@pytest.mark.parametrize("first", [8, 3])
def test_the_accelerator_writes_within_the_matrix_too(device, first) -> None:
    weight = Int4.random(N, K, 32, device=device)
    x = random(21, K, seed=1, device=device, dtype=BF16)
    wider = torch.full((21, N + 24), 7.0, dtype=BF16, device=device)
    out = wider[:, first : first + N]
    tiles = [Tile("wide", 16, 64, tma=tma) for tma in (True, False)]
    call = partial(w4a16.w4a16, x, None, weight.scale, None, weight.tiled(), weight.meta(BF16))
    assert torch.equal(call(out=out, tile=tiles[0]), call(tile=tiles[1]))
    assert (wider[:, :first] == 7).all() and (wider[:, first + N :] == 7).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_another_matrix_is_refused(device, family) -> None:
    call = product(family, 5, device)
    for wrong in (torch.empty(5, N + 1, dtype=BF16), torch.empty(4, N, dtype=BF16), torch.empty(N, 5, dtype=BF16).t()):
        with pytest.raises(ValueError, match=r"^out must be torch.bfloat16 \[5, 40\]"):
            call(wrong.to(device))


def test_the_type_of_the_result_is_that_of_the_given_matrix(device) -> None:
    x, weight = (random(9, K, seed=s, device=device, dtype=BF16) for s in (1, 2))
    out = torch.empty(9, 9, dtype=torch.float32, device=device)
    assert torch.equal(gemm.dense(x, weight, out=out), gemm.dense(x, weight, out_dtype=torch.float32))
    with pytest.raises(ValueError, match=r"^out must be torch.bfloat16"):
        gemm.dense(x, weight, out_dtype=BF16, out=out)
