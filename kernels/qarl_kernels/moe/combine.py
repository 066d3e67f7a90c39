"""From one row per (token, slot) to one row per token: the weighted sum over slots, its gradients, and a plain sum.

Slots are added in order, then the shared expert's result. Each product and each sum is rounded to float32, and the
result is rounded once. A token's bits depend only on its own rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import narrow, widen
from qarl_kernels.groups import Groups, Shared
from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.launch import launch
from qarl_kernels.rows import check_rows
from qarl_kernels.shapes import check_tensor

COLUMNS, WARPS = 1024, 4  # per program: features of one token
BACKWARD_LANES, BACKWARD_WARPS = 4096, 4  # per program at a time: slots of one token, times features


@triton.jit
def _combine_kernel(
    d,  # (R, columns) bf16 or fp16
    weights,  # (T, SLOTS) f32, or None
    added,  # (T, columns), or None
    gate,  # (T,) f32, the factor of `added`, or None
    place,  # (R,) i32
    out,  # (T, columns)
    columns,
    stride_d,
    stride_added,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep = column < columns
    for slot in tl.static_range(SLOTS):
        row = tl.load(place + token * SLOTS + slot).to(tl.int64)
        value = widen(tl.load(d + row * stride_d + column, mask=keep, other=0.0))
        if weights is not None:
            value *= tl.load(weights + token * SLOTS + slot)
        if slot == 0:
            total = value
        else:
            total += value
    if added is not None:
        value = widen(tl.load(added + token * stride_added + column, mask=keep, other=0.0))
        if gate is not None:
            value *= tl.load(gate + token)
        total += value
    tl.store(out + token * columns + column, narrow(total, out.dtype.element_ty), mask=keep)


@triton.jit
def _combine_backward_kernel(
    dy,  # (T, columns) bf16 or fp16
    d,  # (R, columns)
    weights,  # (T, slots) f32
    place,  # (R,) i32, or None: row r is pair r
    grad_d,  # (R, columns), may be d: each value is written by the program that read it, afterwards
    grad_weights,  # (T, slots) f32
    slots,
    columns,
    stride_dy,
    stride_d,
    stride_grad,
    SLOTS: tl.constexpr,  # slots rounded up to a power of two
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    there = slot < slots
    pair = token * slots + slot
    row = pair if place is None else tl.load(place + pair, mask=there, other=0)
    row = row.to(tl.int64)[:, None]
    weight = tl.load(weights + pair, mask=there, other=0.0)[:, None]
    total = tl.zeros([SLOTS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < columns
        keep = there[:, None] & inside[None, :]
        output_grad = widen(tl.load(dy + token * stride_dy + column, mask=inside, other=0.0))[None, :]
        total += output_grad * widen(tl.load(d + row * stride_d + column[None, :], mask=keep, other=0.0))
        grad = narrow(output_grad * weight, grad_d.dtype.element_ty)
        tl.store(grad_d + row * stride_grad + column[None, :], grad, mask=keep)
    tl.store(grad_weights + pair, tl.sum(total, axis=1), mask=there)


def _sum(d: Tensor, weights: Tensor | None, added: Tensor | None, groups: Groups, gate: Tensor | None = None) -> Tensor:
    tokens, columns = groups.rows // groups.slots, d.shape[1]
    out = torch.empty(tokens, columns, dtype=d.dtype, device=d.device)
    width = min(COLUMNS, max(16, next_power_of_2(columns)))
    launch(
        _combine_kernel,
        (tokens, cdiv(columns, width)),
        num_warps=WARPS,
        d=d,
        weights=weights,
        added=added,
        gate=gate,
        place=groups.place,
        out=out,
        columns=columns,
        stride_d=d.stride(0),
        stride_added=0 if added is None else added.stride(0),
        SLOTS=groups.slots,
        COLUMNS=width,
    )
    return out


def combine(d: Tensor, weights: Tensor, groups: Groups, shared: Shared | None = None) -> Tensor:
    """y = sum over a token's slots of float32(d) * weight, plus the shared expert's output * gate: (T, H), d's dtype.

    Args:
        d: (R, H) bf16 or fp16, in sorted order; last dimension contiguous, arbitrary row stride.
        weights: (T, k) float32, contiguous.
        shared: The shared expert's 16-bit output, as d, and contiguous gate; or None.

    Raises:
        ValueError: Shapes or dtypes are not as above.
    """
    _check("d", d, groups.rows)
    _check_factors("weights", weights, groups.rows // groups.slots, groups.slots)
    if shared is None:
        return _sum(d, weights, None, groups)
    tokens = groups.rows // groups.slots
    _check("the shared expert's output", shared.output, tokens, d.shape[1])
    _check_factors("gate", shared.gate, tokens)
    return _sum(d, weights, shared.output, groups, shared.gate)


def combine_backward(dy: Tensor, d: Tensor, weights: Tensor, groups: Groups, into: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of d, weight * dy (R, H) in d's dtype, and of the weights, <dy, d> (T, k) float32.

    Args:
        dy: (T, H) 16-bit, output gradient; last dimension contiguous, arbitrary row stride.
        d, weights, groups: As in `combine`.
        into: (R, H) of d's dtype, receives the gradient of d; may be d itself.

    Raises:
        ValueError: Shapes or dtypes are not as above.
    """
    tokens, columns = groups.rows // groups.slots, d.shape[1]
    _check("dy", dy, tokens, columns)
    _check("d", d, groups.rows)
    _check_factors("weights", weights, groups.rows // groups.slots, groups.slots)
    _check("into", into, groups.rows, columns)
    return into, _backward(dy, d, weights, groups.place, into)


def shared_backward(dy: Tensor, shared: Shared, into: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the shared expert's output, gate * dy (T, H), and of its gate's logit, (T,) float32.

    dy, into, errors: As in `combine_backward`; `into` may be the output itself.
    """
    output, gate = shared.output, shared.gate
    check_rows("dy", dy, output.shape[1])
    _check("the shared expert's output", output, len(dy))
    _check_factors("gate", gate, len(dy))
    _check("into", into, *output.shape)
    grad_gate = _backward(dy, output, gate[:, None], None, into)[:, 0]
    return into, grad_gate * (gate * (1.0 - gate))


def _backward(dy: Tensor, d: Tensor, weights: Tensor, place: Tensor | None, into: Tensor) -> Tensor:
    """Fill `into` and return (T, k). place: None if row r of d is pair r."""
    (tokens, slots), columns = weights.shape, d.shape[1]
    grad_weights = torch.empty(tokens, slots, dtype=torch.float32, device=d.device)
    lanes = next_power_of_2(slots)
    launch(
        _combine_backward_kernel,
        (tokens,),
        num_warps=BACKWARD_WARPS,
        dy=dy,
        d=d,
        weights=weights,
        place=place,
        grad_d=into,
        grad_weights=grad_weights,
        slots=slots,
        columns=columns,
        stride_dy=dy.stride(0),
        stride_d=d.stride(0),
        stride_grad=into.stride(0),
        SLOTS=lanes,
        COLUMNS=min(BACKWARD_LANES // lanes, max(16, next_power_of_2(columns))),
    )
    return grad_weights


def sum_over_slots(grad: Tensor, groups: Groups, added: Tensor | None = None) -> Tensor:
    """Return the gradient of a gathered input, (T, K) in grad's dtype: the sum of each token's rows, then plus `added`.

    grad: (R, K) bf16 or fp16, in sorted order, last dimension contiguous, arbitrary row stride. added: (T, K) 16-bit,
    the gradient of the same input through other paths, such as the router; or None. Raises ValueError for other
    operands.
    """
    _check("grad", grad, groups.rows)
    if added is not None:
        _check("added", added, groups.rows // groups.slots, grad.shape[1])
    return _sum(grad, None, added, groups)


def _check(name: str, x: Tensor, rows: int, columns: int | None = None) -> None:
    check_rows(name, x, columns)
    if x.shape[0] != rows:
        raise ValueError(f"{name} must have {rows} rows for these groups, not {x.shape[0]}")


def _check_factors(name: str, factors: Tensor, *shape: int) -> None:
    check_tensor(name, factors, (torch.float32,), shape, "call .float().contiguous()")
