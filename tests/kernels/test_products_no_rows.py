"""Every product of no rows has no rows."""

from __future__ import annotations

import pytest
import torch
from nvfp4_products import Nvfp4
from products import Int4, random
from qarl_kernels import fp8_block, gemm, nvfp4a16, w4a8, w4a16
from qarl_kernels.launch import INTERPRETED
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 or a GPU"),
    pytest.mark.usefixtures("poisoned"),
]

N, K = 40, 128
BF16 = torch.bfloat16


def no_rows(family: str, device: torch.device) -> Tensor:
    x, s_x = torch.empty(0, K, device=device, dtype=BF16), torch.empty(0, 1, device=device)
    int4, fp4 = Int4.random(N, K, 32, device=device), Nvfp4.random(N, K, device=device)
    s_w, weight = random(N, 1, seed=5, device=device).abs(), random(N, K, seed=6, device=device, dtype=BF16)
    int8, e4m3 = torch.int8, torch.float8_e4m3fn
    match family:
        case "dense":
            return gemm.dense(x, weight)
        case "w8a8" | "fp8":
            dtype = int8 if family == "w8a8" else e4m3
            return gemm.scaled(x.to(dtype), s_x, weight.to(dtype), s_w, None, BF16)
        case "fp8_block":
            return fp8_block.fp8_block(x.to(e4m3), s_x, weight.to(e4m3), s_w[:1], None, BF16)
        case "w4a16" | "w4a16_untiled":
            tiled = int4.tiled() if family == "w4a16" else None
            return w4a16.w4a16(x, int4.packed(), int4.scale, None, tiled, int4.meta(BF16))
        case "w4a8":
            return w4a8.w4a8(x.to(int8), s_x, int4.tiled(), int4.meta_int8(), K, N, None, BF16)
    return nvfp4a16.nvfp4a16(x, *fp4.stored(), *fp4.tiled())


@pytest.mark.parametrize("family", ["dense", "w8a8", "fp8", "fp8_block", "w4a16", "w4a16_untiled", "w4a8", "nvfp4a16"])
def test_no_rows_give_no_rows(device, family: str) -> None:
    result = no_rows(family, device)
    assert result.shape == (0, N) and result.dtype == BF16
