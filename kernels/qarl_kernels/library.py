"""Large 16-bit products through cuBLAS, where it is known to sum as the kernels here do.

cuBLAS chooses its algorithm from the shape, so it is only ever asked for one: `ROWS` rows. That shape is tried once per
(N, K, dtypes) against `gemm.dense`'s own kernel on random data, and used only if every bit agrees (on H100 and H200 its
kernels without split-K do). Rows beyond a multiple of `ROWS` are left to the caller.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

ROWS = 4096


def product(x: Tensor, weight: Tensor, out: Tensor) -> int:
    """Fill out[:done] with x[:done] @ weight^T and return done, the largest usable multiple of ROWS.

    x: (M, K), weight: (N, K) of one 16-bit dtype; out: (M, N) of that dtype or float32.
    """
    whole = x.shape[0] // ROWS * ROWS
    if whole == 0 or x.device.type != "cuda":
        return 0
    if not agrees(*weight.shape, x.dtype, out.dtype, x.device):
        return 0
    for start in range(0, whole, ROWS):
        _multiply(x[start : start + ROWS], weight, out[start : start + ROWS])
    return whole


def _multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


@cache
def agrees(n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the library gives the kernel's bits for (ROWS, K) @ (K, N)."""
    from qarl_kernels import gemm
    from qarl_kernels.tuning import lookup

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"the first product with a weight of {n} x {k} ran inside a CUDA graph; run it once before")
    generator = torch.Generator(device).manual_seed(n * 1_000_003 + k)
    x = torch.randn(ROWS, k, generator=generator, device=device, dtype=dtype)
    weight = torch.randn(n, k, generator=generator, device=device, dtype=dtype)
    ours = torch.empty(ROWS, n, device=device, dtype=out_dtype)
    theirs = torch.empty_like(ours)
    tile = lookup("dense", n, k, ROWS, x, library=False)
    gemm._launch(x, weight, None, None, None, ours, tile)
    _multiply(x, weight, theirs)
    return torch.equal(ours, theirs)
