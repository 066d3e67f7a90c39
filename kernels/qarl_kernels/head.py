"""Log-probs and entropies of given tokens where no row of logits is ever stored: the output layer on a GPU.

One kernel computes tiles of logits and reduces each to a maximum and two sums a row; a small one merges them in the
vocabulary's order. min-p, whose bound follows from the maximum, takes a second such pass.

What is computed is what `qarl_kernels.logprob` says; this serves 16-bit weights, at any temperature, with min-p or
nothing cut. Beside inputs and results there are `PARTIAL` bytes. Nothing waits for the device. The gradient is in
`qarl_kernels.head_backward`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl_kernels.direct import Descriptor
from qarl_kernels.head_kernels import merge_kernel, statistics_kernel
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import capability_of, launch, multiprocessors, supports_tma
from qarl_kernels.truncation import Distribution, Truncation
from qarl_kernels.tuning import Tile

PARTIAL = 1 << 27  # bytes of what tiles are reduced to
PITCH = 128  # rows of `partial` come in multiples of it, and it in multiples of a tile's
MERGED = 32, 64  # rows and tiles that a program of the merge reads at once

# What `tools` may try. The statistics' tile sets the order of a row's sums: it is one and the same whatever the rows.
STATISTICS_TILES = (
    Tile("x_first", 128, 256, 64, warps=8, stages=4, persistent=True),
    Tile("x_first", 128, 256, 64, warps=8, stages=4),
    Tile("x_first", 128, 256, 64, warps=8, stages=3),
    Tile("x_first", 128, 128, 64, warps=4, stages=3),
    Tile("x_first", 128, 128, 64, warps=8, stages=3),
    Tile("x_first", 128, 128, 128, warps=8, stages=3),
    Tile("x_first", 128, 128, 64, warps=8, stages=5, persistent=True),
)
BEFORE_HOPPER = Tile("x_first", 64, 128, 32, warps=4, stages=3)
POINTERS = Tile("x_first", 64, 64, 32)  # on Hopper, for rows that the tensor memory accelerator cannot read


@dataclass(frozen=True)
class Logits:
    """How logits come from hidden states: temperature and min-p, as the kernels take them."""

    scale: float  # float32 reciprocal of the temperature, which is what torch's division multiplies with on a GPU
    log_min_p: float | None  # None: nothing is cut

    @classmethod
    def of(cls, truncation: Truncation) -> Logits:
        one, divisor = torch.ones((), device="cpu"), torch.tensor(truncation.divisor, dtype=torch.float32, device="cpu")
        min_p = truncation.min_p if truncation.active else 0.0
        return cls((one / divisor).item(), math.log(min_p) if min_p > 0.0 else None)


def tile_for(hopper: Tile, hidden: Tensor, weight: Tensor) -> tuple[Tile, bool]:
    """The tile, and whether operands come through the tensor memory accelerator; no matter how many rows there are."""
    if capability_of(hidden) < (9, 0):
        return BEFORE_HOPPER, False
    tma = supports_tma(hidden) and supports_tma(weight)
    return (hopper if tma else POINTERS), tma


@dataclass
class Statistics:
    """Of each row, float32 (R,): log-prob of the target, entropy, logarithm of the sum of exp, largest logit."""

    logp: Tensor
    entropy: Tensor
    lse: Tensor
    largest: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Statistics:
        return cls(*(torch.empty(rows, dtype=torch.float32, device=device) for _ in range(4)))

    def part(self, rows: slice) -> Statistics:
        return Statistics(self.logp[rows], self.entropy[rows], self.lse[rows], self.largest[rows])


def statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, logits: Logits, tile: Tile | None = None
) -> tuple[Statistics, Tensor | None]:
    """Log-probs and entropies of the distribution drawn from, and the mass that its tokens had before the cut.

    hidden: (R, H) 16-bit, rows contiguous; weight: (V, H) of its dtype; targets: (R,) int64; tile: for tuning. Returns
    float32 (R,) each; the mass is None where nothing is cut.
    """
    whole = _pass(hidden, weight, targets, Logits(logits.scale, None), None, tile)
    if logits.log_min_p is None:
        return whole, None
    kept = _pass(hidden, weight, targets, logits, whole.largest, tile)
    return kept, kept.lse.sub(whole.lse).exp_().clamp_(max=1.0)


def fused_distribution(hidden: Tensor, weight: Tensor, truncation: Truncation) -> Distribution:
    """See `qarl_kernels.distribution`. A pass stores its logits too, so that the weight is not read again."""
    hidden, weight, how = hidden.contiguous(), weight.contiguous(), Logits.of(truncation)
    pitch = cdiv(weight.shape[0], 16) * 16  # rows that the tensor memory accelerator writes
    stored = torch.empty(hidden.shape[0], pitch, dtype=torch.float32, device=hidden.device)[:, : weight.shape[0]]
    log_sum = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    top = None
    if how.log_min_p is not None:
        top = _pass(hidden, weight, None, Logits(how.scale, None), None, None).largest
    found = _pass(hidden, weight, None, how, top, None, (stored, log_sum))
    return Distribution(stored, top is not None, (found.largest, log_sum))


def _pass(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    logits: Logits,
    top: Tensor | None,
    tile: Tile | None,
    kept: tuple[Tensor, Tensor] | None = None,
) -> Statistics:
    """kept: gets the logits (R, V), and of each row the logarithm of the sum of exp(logit - largest) (R,)."""
    rows, features = hidden.shape
    vocabulary = weight.shape[0]
    chosen, tma = tile_for(STATISTICS_TILES[0], hidden, weight)
    tile = tile or chosen
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
        persistent = tile.persistent and tma  # whatever the rows: what is compiled orders their sums
        started = min(programs, multiprocessors(x)) if persistent else programs
        shared = {
            "M": count,
            "padded": padded,
            "partial": partial,
            "target_logit": None if target_logit is None else target_logit[part],
            "top": None if top is None else top[part],
            "log_min_p": logits.log_min_p or 0.0,
            "CUT": top is not None,
        }
        written = None if kept is None else kept[0][part]
        if written is not None and tma:
            written = Descriptor(written, (tile.block_m, tile.block_n // 4))
        launch(
            statistics_kernel,
            (started,),
            num_warps=tile.warps,
            num_stages=tile.stages,
            x=Descriptor(x, (tile.block_m, tile.block_k)) if tma else x,
            w=Descriptor(weight, (tile.block_n, tile.block_k)) if tma else weight,
            targets=None if targets is None else targets[part],
            logits=written,
            V=vocabulary,
            K=features,
            stride_xm=x.stride(0),
            stride_wn=weight.stride(0),
            stride_logits=0 if kept is None else kept[0].stride(0),
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
            log_sum=None if kept is None else kept[1][part],
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


def slices(rows: int, step: int) -> Iterator[slice]:
    """[0, rows) in stretches of `step`."""
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
