"""Log-probs and entropies of given tokens without storing a row of logits: the output layer on a GPU.

Forward: one kernel computes tiles of logits and reduces each to a maximum and two sums per row; a second one merges the
tiles in vocabulary order. min-p depends on the row's maximum, so it takes a second pass.

Backward: a kernel recomputes the logits of a range of the vocabulary and writes their gradient (16-bit), and two
ordinary GEMMs accumulate it into the float32 gradients of the hidden states and of the weight.

The definition is `qarl_kernels.logprob`. This file serves 16-bit weights at any temperature, with min-p or without
truncation. Beside inputs and results, memory holds `PARTIAL` bytes in the forward, and in the backward `GRADIENT` bytes
and float32 sums for `GRADIENT / WIDTH / 2` hidden states. Nothing synchronizes with the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qarl_kernels.backward import weight_grad, weight_grad_buffer
from qarl_kernels.gemm import POINTERS
from qarl_kernels.head_kernels import gradient_kernel, merge_kernel, statistics_kernel
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import capability_of, launch, multiprocessors, supports_tma, tma_descriptor
from qarl_kernels.truncation import Distribution, Truncation
from qarl_kernels.tuning import Tile

PARTIAL = 1 << 27  # bytes of the per-tile sums
PITCH = 128  # the row stride of the per-tile sums is a multiple of this, and this a multiple of a tile's rows
MERGED = 32, 64  # rows and tiles that a program of the merge kernel loads at once
GRADIENT = 1 << 27  # bytes of the logits' gradient
WIDTH = 8192  # vocabulary entries whose gradient is in memory at once

# The statistics' tile fixes the order of a row's sums, so it must not depend on the number of rows.
STATISTICS_TILE = Tile("x_first", 128, 256, 64, warps=8, stages=4, persistent=True)
GRADIENT_TILE = Tile("x_first", 128, 256, 64, warps=8, stages=4, persistent=True, halves=True)
GRADIENT_CUT = Tile("x_first", 128, 128, 64, warps=8, stages=4, persistent=True)  # with min-p; a larger tile spills
BEFORE_HOPPER = Tile("x_first", 64, 128, 32, warps=4, stages=3)


@dataclass(frozen=True)
class Logits:
    """Temperature and min-p as kernel arguments."""

    scale: float  # float32 reciprocal of the temperature: torch's division on a GPU multiplies by it
    log_min_p: float | None  # None: no truncation

    @classmethod
    def of(cls, truncation: Truncation) -> Logits:
        one, divisor = torch.ones((), device="cpu"), torch.tensor(truncation.divisor, dtype=torch.float32, device="cpu")
        min_p = truncation.min_p if truncation.active else 0.0
        return cls((one / divisor).item(), math.log(min_p) if min_p > 0.0 else None)


@dataclass
class Statistics:
    """Per-row results, float32 (R,): log-prob of the target, entropy, log-sum-exp and largest logit."""

    logp: Tensor
    entropy: Tensor
    lse: Tensor
    largest: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Statistics:
        return cls(*(torch.empty(rows, dtype=torch.float32, device=device) for _ in range(4)))

    def part(self, rows: slice) -> Statistics:
        return Statistics(self.logp[rows], self.entropy[rows], self.lse[rows], self.largest[rows])


def tile_for(hopper: Tile, hidden: Tensor, weight: Tensor) -> tuple[Tile, bool]:
    """Return the tile, and whether TMA loads the operands. The choice does not depend on the number of rows."""
    if capability_of(hidden) < (9, 0):
        return BEFORE_HOPPER, False
    tma = supports_tma(hidden) and supports_tma(weight)
    return (hopper if tma else POINTERS), tma


def slices(rows: int, step: int) -> Iterator[slice]:
    """Split [0, rows) into slices of at most `step`."""
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def statistics(hidden: Tensor, weight: Tensor, targets: Tensor, logits: Logits) -> tuple[Statistics, Tensor | None]:
    """Compute log-probs and entropies under the sampling distribution.

    Args:
        hidden: (R, H) 16-bit, contiguous.
        weight: (V, H) of hidden's dtype.
        targets: (R,) int64.
        logits: Temperature and min-p.

    Returns:
        The statistics, and the probability that the kept tokens had before truncation, float32 (R,); None without
        truncation.
    """
    whole = _pass(hidden, weight, targets, Logits(logits.scale, None), None)
    if logits.log_min_p is None:
        return whole, None
    kept = _pass(hidden, weight, targets, logits, whole.largest)
    return kept, kept.lse.sub(whole.lse).exp_().clamp_(max=1.0)


def fused_distribution(hidden: Tensor, weight: Tensor, truncation: Truncation) -> Distribution:
    """Compute `qarl_kernels.logprob.distribution`. A pass also stores its logits, so the weight is not read again."""
    hidden, weight, how = hidden.contiguous(), weight.contiguous(), Logits.of(truncation)
    pitch = cdiv(weight.shape[0], 16) * 16  # a row stride that TMA can write
    stored = torch.empty(hidden.shape[0], pitch, dtype=torch.float32, device=hidden.device)[:, : weight.shape[0]]
    log_sum = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    top = None
    if how.log_min_p is not None:
        top = _pass(hidden, weight, None, Logits(how.scale, None), None).largest
    found = _pass(hidden, weight, None, how, top, (stored, log_sum))
    return Distribution(stored, top is not None, (found.largest, log_sum))


def _pass(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    logits: Logits,
    top: Tensor | None,
    stored: tuple[Tensor, Tensor] | None = None,
) -> Statistics:
    """Run both kernels over all rows.

    top: (R,) float32 largest logits, which min-p cuts by; None: no truncation. stored: receives the logits (R, V) and
    log(sum(exp(logit - largest))) (R,).
    """
    rows, features = hidden.shape
    vocabulary = weight.shape[0]
    tile, tma = tile_for(STATISTICS_TILE, hidden, weight)
    assert PITCH % tile.block_m == 0, tile
    tiles = cdiv(vocabulary, tile.block_n)
    found = Statistics.empty(rows, hidden.device)
    target_logit = None if targets is None else torch.empty_like(found.logp)
    step = max(PARTIAL // (12 * tiles) // PITCH, 1) * PITCH
    padded = min(step, cdiv(rows, PITCH) * PITCH)
    partial = torch.empty(3, tiles, padded, dtype=torch.float32, device=hidden.device)
    for part in slices(rows, step):
        x, out = hidden[part], found.part(part)
        count = x.shape[0]
        programs = cdiv(count, tile.block_m) * tiles
        persistent = tile.persistent and tma  # must not depend on the rows: the compiled code orders their sums
        started = min(programs, multiprocessors(x)) if persistent else programs
        shared: dict[str, Any] = {
            "M": count,
            "padded": padded,
            "partial": partial,
            "target_logit": None if target_logit is None else target_logit[part],
            "top": None if top is None else top[part],
            "log_min_p": logits.log_min_p or 0.0,
            "CUT": top is not None,
        }
        written = None if stored is None else stored[0][part]
        if written is not None and tma:
            written = tma_descriptor(written, (tile.block_m, tile.block_n // 4))
        launch(
            statistics_kernel,
            (started,),
            num_warps=tile.warps,
            num_stages=tile.stages,
            x=tma_descriptor(x, (tile.block_m, tile.block_k)) if tma else x,
            w=tma_descriptor(weight, (tile.block_n, tile.block_k)) if tma else weight,
            targets=None if targets is None else targets[part],
            logits=written,
            V=vocabulary,
            K=features,
            stride_xm=x.stride(0),
            stride_wn=weight.stride(0),
            stride_logits=0 if stored is None else stored[0].stride(0),
            scale=logits.scale,
            programs=started,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            RAGGED=vocabulary % tile.block_n != 0,
            TMA=tma,
            PERSISTENT=persistent,
            **shared,
        )
        launch(
            merge_kernel,
            (cdiv(count, MERGED[0]),),
            num_warps=4,
            log_sum=None if stored is None else stored[1][part],
            logp=out.logp,
            entropy=out.entropy,
            lse=out.lse,
            largest=out.largest,
            tiles=tiles,
            ROWS=MERGED[0],
            TILES=MERGED[1],
            **shared,
        )
    return found


def gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    logits: Logits,
    found: Statistics,
    grad: Tensor | None,
    grad_entropy: Tensor | None,
    grad_weight: Tensor | None,
) -> Tensor:
    """Compute the gradient of the hidden states, and add the weight's to `grad_weight`.

    The logits' gradient is rounded to bf16 for bf16 weights. fp16 has too little range for it, so with fp16 weights it
    stays float32, and so do the products.

    Args:
        hidden, weight, targets, logits: As for `statistics`.
        found: Result of `statistics`.
        grad, grad_entropy: float32 (R,), output gradients of logp and entropy divided by the temperature; at most one
            is None.
        grad_weight: float32 (V, H), or None.

    Returns:
        (R, H) of hidden's dtype.
    """
    dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
    result = torch.empty_like(hidden)
    rows = min(max(hidden.shape[0], 1), GRADIENT // WIDTH // dtype.itemsize)
    width = min(WIDTH, cdiv(weight.shape[0], 8) * 8)  # 16-byte row strides
    buffer = torch.empty(rows, width, dtype=dtype, device=hidden.device)
    total = torch.empty(rows, hidden.shape[1], dtype=torch.float32, device=hidden.device)
    for part in slices(hidden.shape[0], rows):
        x = hidden[part]
        wide = x.to(dtype)
        sums = total[: x.shape[0]].zero_()
        of_logp, of_entropy = (None if value is None else value[part] for value in (grad, grad_entropy))
        for columns in slices(weight.shape[0], width):
            w = weight[columns]
            out = buffer[: x.shape[0], : w.shape[0]]
            _logit_gradient(x, w, out, columns.start, targets[part], of_logp, of_entropy, logits, found.part(part))
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
) -> None:
    """Write the gradient of the logits x @ w^T into out (M, N). w: rows [first, first + N) of the weight."""
    cut = logits.log_min_p is not None
    tile, tma = tile_for(GRADIENT_CUT if cut else GRADIENT_TILE, x, w)
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
        x=tma_descriptor(x, (tile.block_m, tile.block_k)) if tma else x,
        w=tma_descriptor(w, (tile.block_n, tile.block_k)) if tma else w,
        out=tma_descriptor(out, (tile.block_m, tile.block_n // (2 if halves else 1))) if tma_out else out,
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
    """`qarl_kernels.logprob.token_logprobs` by these kernels.

    mass: float32 (R,) that receives the probability of the kept tokens before truncation, or None.
    """

    @staticmethod
    def forward(ctx, hidden, master, weight, targets, truncation, mass, sum_of):
        ctx.set_materialize_grads(False)  # an unused output has gradient None, and nothing is computed for it
        hidden, weight = hidden.contiguous(), weight.contiguous()
        logits = Logits.of(truncation)
        found, retained = statistics(hidden, weight, targets, logits)
        if mass is not None:
            mass.copy_(retained)
        ctx.save_for_backward(hidden, weight, targets, found.logp, found.entropy, found.lse, found.largest)
        ctx.logits, ctx.divisor, ctx.master, ctx.sum_of = logits, truncation.divisor, master, sum_of
        return found.logp, found.entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        if grad is None and grad_entropy is None:
            return (None,) * 7
        hidden, weight, targets, *found = ctx.saved_tensors
        into, returned = weight_grad_buffer(ctx.master, ctx.sum_of, weight)
        of_logp, of_entropy = (None if g is None else (g / ctx.divisor).contiguous() for g in (grad, grad_entropy))
        grad_hidden = gradients(hidden, weight, targets, ctx.logits, Statistics(*found), of_logp, of_entropy, into)
        return grad_hidden, returned, None, None, None, None, None
