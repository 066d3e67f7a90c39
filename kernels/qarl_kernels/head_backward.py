"""Gradient of `qarl_kernels.head`, of the hidden states and the output layer's weight; the two as a step of autograd.

A kernel computes a stretch of the vocabulary's logits again and writes their gradient (16-bit), which two ordinary
GEMMs multiply into float32 sums: those of the hidden states and those of the weight. Beside inputs and results there
are `GRADIENT` bytes and a float32 matrix of the size of at most `GRADIENT / WIDTH / 2` hidden states. Nothing waits
for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_kernels.backward import weight_grad, weight_sum
from qarl_kernels.direct import Descriptor
from qarl_kernels.head import Logits, Statistics, slices, statistics, tile_for
from qarl_kernels.head_kernels import gradient_kernel
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch, multiprocessors, supports_tma
from qarl_kernels.tuning import Tile

GRADIENT = 1 << 27  # bytes of the logits' gradient
WIDTH = 8192  # tokens of the vocabulary whose gradient is held at once

# What `tools` may try.
GRADIENT_TILES = (
    Tile("x_first", 128, 256, 64, warps=8, stages=4, persistent=True, halves=True),
    Tile("x_first", 128, 256, 64, warps=8, stages=3, persistent=True, halves=True),
    Tile("x_first", 128, 128, 64, warps=8, stages=4, persistent=True),
    Tile("x_first", 128, 128, 64, warps=8, stages=3, halves=True),
)
GRADIENT_CUT = Tile("x_first", 128, 128, 64, warps=8, stages=4, persistent=True)  # a larger tile spills


def gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    logits: Logits,
    found: Statistics,
    grad: Tensor | None,
    grad_entropy: Tensor | None,
    grad_weight: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """The gradient of the hidden states (R, H), of their dtype; that of the weight is added to `grad_weight`.

    found: of `statistics`; grad, grad_entropy: float32 (R,), what arrives at logp and entropy over the temperature, not
    both None; grad_weight: float32 (V, H), or None.
    The logits' gradient is rounded to bf16 for bf16 weights; for fp16, whose range it does not fit, it is not rounded,
    and products are float32.
    """
    dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
    result = torch.empty_like(hidden)
    rows = min(max(hidden.shape[0], 1), GRADIENT // WIDTH // dtype.itemsize)
    width = min(WIDTH, cdiv(weight.shape[0], 8) * 8)  # rows of 16 bytes
    buffer = torch.empty(rows, width, dtype=dtype, device=hidden.device)
    total = torch.empty(rows, hidden.shape[1], dtype=torch.float32, device=hidden.device)
    for part in slices(hidden.shape[0], rows):
        x = hidden[part]
        wide = x.to(dtype)
        sums = total[: x.shape[0]].zero_()
        of_rows = [None if value is None else value[part] for value in (targets, grad, grad_entropy)]
        for columns in slices(weight.shape[0], width):
            w = weight[columns]
            out = buffer[: x.shape[0], : w.shape[0]]
            _logit_gradient(x, w, out, columns.start, *of_rows, logits, found.part(part), tile)
            weight_grad(out.t(), w.to(dtype), into=sums)  # sums += out @ w
            if grad_weight is not None:
                weight_grad(out, wide, into=grad_weight[columns])
        result[part] = sums
    return result


def _logit_gradient(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    first: int,
    targets: Tensor,
    grad: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Logits,
    found: Statistics,
    tile: Tile | None,
) -> None:
    """Fill out (M, N) with the gradient of the logits x @ w^T, w being rows [first, first + N) of the weight."""
    cut = logits.log_min_p is not None
    chosen, tma = tile_for(GRADIENT_CUT if cut else GRADIENT_TILES[0], x, w)
    tile = tile or chosen
    m, n = out.shape
    tma_out = tma and out.element_size() == 2 and supports_tma(out)
    halves = tma_out and tile.halves
    programs = cdiv(m, tile.block_m) * cdiv(n, tile.block_n)
    started = min(programs, multiprocessors(x)) if tile.persistent and tma_out else programs
    launch(
        gradient_kernel,
        (started,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        x=Descriptor(x, (tile.block_m, tile.block_k)) if tma else x,
        w=Descriptor(w, (tile.block_n, tile.block_k)) if tma else w,
        out=Descriptor(out, (tile.block_m, tile.block_n // (2 if halves else 1))) if tma_out else out,
        targets=targets,
        lse=found.lse,
        entropy=None if grad_entropy is None else found.entropy,
        grad=grad,
        grad_entropy=grad_entropy,
        logp=found.logp if cut else None,
        top=found.largest if cut else None,
        M=m,
        N=n,
        K=x.shape[1],
        first=first,
        stride_xm=x.stride(0),
        stride_wn=w.stride(0),
        stride_om=out.stride(0),
        scale=logits.scale,
        log_min_p=logits.log_min_p or 0.0,
        programs=started,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SCORE=grad is not None,
        ENTROPY=grad_entropy is not None,
        CUT=cut,
        TMA=tma,
        TMA_OUT=tma_out,
        PERSISTENT=started < programs,
        HALVES=halves,
    )


class FusedTokenLogProbs(torch.autograd.Function):
    """`token_logprobs` by these kernels; mass: float32 (R,) that the retained mass is written to, or None."""

    @staticmethod
    def forward(ctx, hidden, master, weight, targets, truncation, mass, sums):
        ctx.set_materialize_grads(False)  # an output that is not used gives None, and its gradient is not computed
        hidden, weight = hidden.contiguous(), weight.contiguous()
        logits = Logits.of(truncation)
        found, retained = statistics(hidden, weight, targets, logits)
        if mass is not None:
            mass.copy_(retained)
        ctx.save_for_backward(hidden, weight, targets, found.logp, found.entropy, found.lse, found.largest)
        ctx.logits, ctx.divisor, ctx.master, ctx.sums = logits, truncation.divisor, master, sums
        return found.logp, found.entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        if grad is None and grad_entropy is None:
            return (None,) * 7
        hidden, weight, targets, *found = ctx.saved_tensors
        into, returned = weight_sum(ctx.master, ctx.sums, weight)
        arriving = (None if g is None else (g / ctx.divisor).contiguous() for g in (grad, grad_entropy))
        grad_hidden = gradients(hidden, weight, targets, ctx.logits, Statistics(*found), *arriving, into)
        return grad_hidden, returned, None, None, None, None, None
