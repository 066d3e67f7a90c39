"""The router: which experts each token goes to, and the weights of their results; one kernel forward, one backward.

logits = x @ W^T in float32, not rounded; softmax; the k largest logits, ties to the lower expert, NaN as the smallest;
the chosen probabilities, optionally divided by their sum. A token's bits do not depend on other tokens or the tile:
logits are one chain of products along H, as in `qarl_kernels.gemm`, the softmax's sum is a tree over the experts, and
the chosen probabilities are added in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import dot, operand
from qarl_kernels.groups import Routed
from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.launch import capability_of, launch
from qarl_kernels.moe import reference
from qarl_kernels.shapes import check_16_bit, check_tensor

MAX_EXPERTS, MAX_SLOTS = 512, 16
_LEVELS = tl.constexpr(MAX_EXPERTS.bit_length() - 1)  # of a tree over so many experts
FEW_TOKENS = 2048  # at most: tiles of 16 tokens, because more programs outweigh more reads of the weight
BACKWARD_LANES, BACKWARD_WARPS = 2048, 4  # per program: tokens times experts


@triton.jit
def _softmax(logits, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Softmax of each row (ROWS, LANES) f32, -inf beyond the experts; a pairwise tree sum, whatever the layout."""
    exponentials = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    total = exponentials
    for level in tl.static_range(_LEVELS):
        if (LANES >> level) > 1:
            even, odd = tl.split(tl.reshape(total, [ROWS, LANES >> (level + 1), 2]))
            total = even + odd
    return tl.div_rn(exponentials, tl.broadcast_to(tl.reshape(total, [ROWS, 1]), [ROWS, LANES]))


@triton.jit
def _largest(logits, there, COUNT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr):
    """The experts of the COUNT largest logits of each row, (ROWS, SLOTS) i32, in slots below COUNT."""
    lane = tl.arange(0, LANES)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    comparable = tl.where(logits == logits, logits, float("-inf")) + 0.0  # -0 and 0 are equal
    bits = comparable.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    TAKEN: tl.constexpr = -(1 << 31)  # below the key of -inf
    keys = tl.where(there, ordered, TAKEN)
    found = tl.zeros([ROWS, SLOTS], tl.int32)
    for j in range(COUNT):
        largest = keys == tl.max(keys, axis=1)[:, None]
        expert = tl.min(tl.where(largest, lane, LANES), axis=1)[:, None]  # ties: the lower expert
        found = tl.where(slot == j, expert, found)
        keys = tl.where(lane == expert, TAKEN, keys)
    return found


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    x,  # (rows, columns) bf16 or fp16
    weight,  # (experts, columns)
    chosen,  # (rows, COUNT) i32 or i64, or None
    logits,  # (rows, experts) f32
    ids,  # (rows, COUNT) i32
    weights,  # (rows, COUNT) f32
    rows,
    columns,
    experts,
    stride_x,
    stride_weight,
    COUNT: tl.constexpr,  # slots per token
    SLOTS: tl.constexpr,  # COUNT rounded up to a power of two
    LANES: tl.constexpr,  # experts rounded up to a power of two
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    acc = tl.zeros([ROWS, LANES], tl.float32)
    for step in range(tl.cdiv(columns, BLOCK_K)):
        a = operand(x, first, rows, step * BLOCK_K, columns, stride_x, ROWS, BLOCK_K, False)
        b = operand(weight, 0, experts, step * BLOCK_K, columns, stride_weight, LANES, BLOCK_K, False)
        acc = dot(a, b.T, acc)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    exists = row < rows
    lane = tl.arange(0, LANES)[None, :]
    there = lane < experts
    tl.store(logits + row * experts + lane, acc, mask=exists & there)
    slot = tl.arange(0, SLOTS)[None, :]
    if chosen is None:
        found = _largest(acc, there, COUNT, ROWS, LANES, SLOTS)
    else:
        found = tl.load(chosen + row * COUNT + slot, mask=exists & (slot < COUNT), other=0)
        found = tl.minimum(tl.maximum(found, 0), experts - 1).to(tl.int32)
    # After the experts are found, so that it does not occupy registers meanwhile.
    p = _softmax(tl.where(there, acc, float("-inf")), ROWS, LANES)
    # Sort the slots by expert. Keys are distinct even if an expert comes twice.
    LAST: tl.constexpr = 1 << 30
    waiting = tl.where(slot < COUNT, found * SLOTS + slot, LAST)
    its_ids = tl.zeros([ROWS, SLOTS], tl.int32)
    its_weights = tl.zeros([ROWS, SLOTS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for j in range(COUNT):
        least = tl.min(waiting, axis=1)
        waiting = tl.where(waiting == least[:, None], LAST, waiting)
        expert = least // SLOTS
        share = tl.sum(tl.where(lane == expert[:, None], p, 0.0), axis=1)
        total += share
        its_ids = tl.where(slot == j, expert[:, None], its_ids)
        its_weights = tl.where(slot == j, share[:, None], its_weights)
    if NORMALIZE:
        its_weights = tl.div_rn(its_weights, tl.broadcast_to(total[:, None], [ROWS, SLOTS]))
    at = row * COUNT + slot
    tl.store(ids + at, its_ids, mask=exists & (slot < COUNT))
    tl.store(weights + at, its_weights, mask=exists & (slot < COUNT))


@triton.jit(do_not_specialize=["rows"])
def _route_backward_kernel(
    grad_weights,  # (rows, COUNT) f32
    logits,  # (rows, experts) f32
    ids,  # (rows, COUNT) i32
    weights,  # (rows, COUNT) f32
    grad_logits,  # (rows, experts) f32
    rows,
    experts,
    COUNT: tl.constexpr,
    LANES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = at < rows
    row = at.to(tl.int64)
    inner = tl.zeros([ROWS], tl.float32)
    for j in range(COUNT):
        grad = tl.load(grad_weights + row * COUNT + j, mask=exists, other=0.0)
        inner += grad * tl.load(weights + row * COUNT + j, mask=exists, other=0.0)
    lane = tl.arange(0, LANES)[None, :]
    result = tl.zeros([ROWS, LANES], tl.float32)
    for j in range(COUNT):
        grad = tl.load(grad_weights + row * COUNT + j, mask=exists, other=0.0)
        if NORMALIZE:  # the other experts' probabilities cancel
            grad = tl.load(weights + row * COUNT + j, mask=exists, other=0.0) * (grad - inner)
        expert = tl.load(ids + row * COUNT + j, mask=exists, other=0)
        result += tl.where(lane == expert[:, None], grad[:, None], 0.0)
    keep = exists[:, None] & (lane < experts)
    if not NORMALIZE:
        its_logits = tl.load(logits + row[:, None] * experts + lane, mask=keep, other=float("-inf"))
        result = _softmax(tl.where(exists[:, None], its_logits, 0.0), ROWS, LANES) * (result - inner[:, None])
    tl.store(grad_logits + row[:, None] * experts + lane, result, mask=keep)


def _tile(rows: int, lanes: int, before_hopper: bool) -> tuple[int, int, int, int]:
    """(tokens, features, warps, stages) of a tile.

    A tile has all experts, so it has few tokens to fit in registers. A decode's tokens fill one or a few tiles, which
    read the whole weight: many stages hide the latency.
    """
    if lanes > 128:
        return (16, 64, 4, 2 if before_hopper else 4) if lanes == 256 else (16, 32, 8, 2 if before_hopper else 4)
    if rows > FEW_TOKENS:
        return 32, 64, 4, 3
    return (16, 64, 4, 3) if before_hopper else (16, 64, 4, 9)


def route(
    x: Tensor, weight: Tensor, k: int, normalize: bool, chosen: Tensor | None = None, kernels: bool = False
) -> Routed:
    """Choose each token's experts, ascending, and their weights. Expert ids are valid whatever the inputs hold.

    Args:
        x: (T, H), last dimension contiguous, arbitrary row stride; bf16 or fp16 for the kernel.
        weight: (E, H) of x's dtype, in plain torch also float32.
        k: Experts per token, at most 16 and E; E is at most 512.
        normalize: Divide a token's weights by their sum.
        chosen: (T, k) int32 or int64, contiguous: experts to take instead, in any order, with the weights of the
            logits. Ids out of range are clamped.
        kernels: Use Triton instead of plain torch.

    Raises:
        ValueError: Shapes or dtypes are not as above.
    """
    tokens, columns = x.shape
    experts = weight.shape[0]
    if weight.shape[1] != columns:
        raise ValueError(f"x has {columns} features and the router's weight {weight.shape[1]}; they must agree")
    if not 1 <= k <= min(experts, MAX_SLOTS) or experts > MAX_EXPERTS:
        raise ValueError(f"a router chooses 1 to {MAX_SLOTS} of at most {MAX_EXPERTS} experts, not {k} of {experts}")
    if chosen is not None:
        check_tensor("chosen", chosen, (torch.int32, torch.int64), (tokens, k), "pass k experts per token")
    if not kernels:
        return reference.route(x, weight, k, normalize, chosen)
    check_16_bit("route", x, weight)
    routed = Routed(
        torch.empty(tokens, experts, dtype=torch.float32, device=x.device),
        torch.empty(tokens, k, dtype=torch.int32, device=x.device),
        torch.empty(tokens, k, dtype=torch.float32, device=x.device),
    )
    lanes = max(16, next_power_of_2(experts))
    rows, block_k, warps, stages = _tile(tokens, lanes, capability_of(x) < (9, 0))
    launch(
        _route_kernel,
        (cdiv(tokens, rows),),
        num_warps=warps,
        num_stages=stages,
        x=x,
        weight=weight,
        chosen=chosen,
        logits=routed.logits,
        ids=routed.experts,
        weights=routed.weights,
        rows=tokens,
        columns=columns,
        experts=experts,
        stride_x=x.stride(0),
        stride_weight=weight.stride(0),
        COUNT=k,
        SLOTS=max(2, next_power_of_2(k)),
        LANES=lanes,
        NORMALIZE=normalize,
        ROWS=rows,
        BLOCK_K=block_k,
    )
    return routed


def route_backward(grad_weights: Tensor, routed: Routed, normalize: bool, kernels: bool = False) -> Tensor:
    """The logits' gradient (T, E) float32. grad_weights: (T, k) float32, contiguous; normalize: as in `route`."""
    if not kernels:
        return reference.route_backward(grad_weights, routed, normalize)
    tokens, experts = routed.logits.shape
    grad_logits = torch.empty_like(routed.logits)
    lanes = next_power_of_2(experts)
    rows = max(1, BACKWARD_LANES // lanes)
    launch(
        _route_backward_kernel,
        (cdiv(tokens, rows),),
        num_warps=BACKWARD_WARPS,
        grad_weights=grad_weights,
        logits=routed.logits,
        ids=routed.experts,
        weights=routed.weights,
        grad_logits=grad_logits,
        rows=tokens,
        experts=experts,
        COUNT=routed.experts.shape[1],
        LANES=lanes,
        NORMALIZE=normalize,
        ROWS=rows,
    )
    return grad_logits
