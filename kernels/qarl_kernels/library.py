"""16-bit products through cuBLAS, for shapes at which it is bit-identical to qarl's kernels.

cuBLAS chooses its algorithm by shape, so it is only called with a few row counts: `ROWS`, and the batch sizes that
decodes are captured for in CUDA graphs (`DECODE_ROWS`). Each shape is verified once per (N, K, dtype) against `gemm`'s
own kernel on random data, and used only if every bit agrees (on H100 its kernels without split-K do). The caller
computes other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from qarl_kernels.launch import collecting

ROWS = (4096, 1024)
# Measured on an H100 with 256 rows and the best tiles: cuBLAS takes 0.82, 0.80 and 0.80 of the kernel's time for all
# layers of Qwen2.5-1.5B, Qwen2.5-7B and Qwen3-4B. It splits K for some down projections, which the comparison finds.
DECODE_ROWS = range(64, 513, 32)

Kernel = Callable[[Tensor, Tensor, Tensor], None]  # x, weight, out


def product(x: Tensor, weight: Tensor, out: Tensor, kernel: Kernel) -> int:
    """Write x[:done] @ weight^T to out[:done].

    Args:
        x: (M, K), weight: (N, K), out: (M, N), all of one 16-bit dtype.
        kernel: The kernel whose bits are required.

    Returns:
        The number of rows written, `done`.
    """
    done = 0
    if x.device.type != "cuda" or collecting():
        return done
    for rows in ROWS:
        if x.shape[0] - done >= rows and agrees(kernel, rows, *weight.shape, x.dtype, x.device):
            while x.shape[0] - done >= rows:
                multiply(x[done : done + rows], weight, out[done : done + rows])
                done += rows
    rest = x.shape[0] - done
    # Other strides or alignments may make cuBLAS choose an algorithm that was not compared.
    plain = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, weight, out))
    if rest in DECODE_ROWS and plain and agrees(kernel, rest, *weight.shape, x.dtype, x.device):
        multiply(x[done:], weight, out[done:])
        done += rest
    return done


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Fill out (M, N) with x (M, K) times weight (N, K) by cuBLAS."""
    torch.mm(x, weight.t(), out=out)


@cache
def agrees(kernel: Kernel, rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether cuBLAS gives the kernel's bits for (rows, K) @ (K, N)."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"the first product with a {n} x {k} weight ran in CUDA graph capture; run it once before")
    generator = torch.Generator(device).manual_seed(n * 1_000_003 + k)
    x = torch.randn(rows, k, generator=generator, device=device, dtype=dtype)
    weight = torch.randn(n, k, generator=generator, device=device, dtype=dtype)
    ours = torch.empty(rows, n, device=device, dtype=dtype)
    theirs = torch.empty_like(ours)
    kernel(x, weight, ours)
    multiply(x, weight, theirs)
    return torch.equal(ours, theirs)
