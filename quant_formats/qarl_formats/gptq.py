"""GPTQ: codes that keep the outputs of a linear layer, instead of the nearest ones (Frantar et al. 2022, algorithm 1).

For inputs X [T, K] of a layer with weight W [N, K], GPTQ minimizes ||X W^T - X W_deq^T||, which depends on X through
H = X^T X only. Columns are rounded one after the other. The error of each is compensated by the columns that are not
rounded yet:

    e_j = (w_j - deq(code_j)) / U_jj        U: upper Cholesky factor of (H + DAMP * mean(diag H) * I)^-1
    w_k = w_k - e_j U_jk                    for the columns k that follow

Columns with large inputs come first ("activation order"), while the most columns are left to compensate.

Scales and zero points are those of round-to-nearest. A scale is a function of the ends of its group (absmax / 7.5 for
int4), so a master exists only if the codes reach these ends (`qarl_formats.preimage`). The elements at the ends
therefore keep their nearest codes, and other columns compensate their errors too. Where that is not enough (zeros, or
a float32 scale for which 7.5 scales round to code -7), the whole group keeps its nearest codes, which have a master:
their weights.

llm-compressor is not used: version 0.14 requires compressed-tensors 0.19, and its codes have no masters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_formats.scheme import CodeGrid, Scheme, Shape

DAMP = 0.01  # fraction of the mean of the Hessian's diagonal that is added to the diagonal
BLOCK = 128  # columns whose updates of all later columns are one matrix product
_RETRIES = 4


@torch.no_grad()
def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    shared: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize a weight so that its products with calibration inputs change little.

    Args:
        weight: float32 [N, K], finite, of a shape that fits the scheme; not changed.
        hessian: X^T X of the inputs, [K, K]; its dtype (float32 or float64) is that of the updates.
        scheme: One with `chooses_codes`.
        shared: See `Scheme.quantize`.

    Returns:
        The stored tensors by suffix, and a master that quantizes to them, float32 [N, K].

    Raises:
        ValueError: H has no Cholesky factor.
    """
    shape = weight.shape[0], weight.shape[1]
    nearest, _ = scheme.quantize(weight.contiguous(), shared=shared)
    grid = scheme.code_grid(nearest, shape)
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(hessian[order][:, order])
    codes = scheme.codes(nearest, shape).float()
    fixed = _ends(weight, grid, both="weight_zero_point" in nearest)
    while True:
        stored = scheme.with_codes(nearest, _compensated(weight, codes, fixed, grid, order, factor))
        master, missing = scheme.preimage(stored, shape)
        if not missing:
            return stored, master
        lost = _without_master(scheme, stored, master, shape, shared)
        if not (lost & ~fixed).any():
            return stored, torch.where(lost, weight, master)
        fixed |= lost


def _compensated(weight: Tensor, codes: Tensor, fixed: Tensor, grid: CodeGrid, order: Tensor, factor: Tensor) -> Tensor:
    """Return the codes that GPTQ chooses, float32 [N, K].

    codes: The nearest codes. fixed: bool [N, K], which of them to keep. order: Order in which columns are rounded.
    factor: U for that order.
    """
    columns, dtype, levels = len(order), factor.dtype, grid.levels.to(factor.dtype)
    between = (levels[1:] + levels[:-1]) / 2
    # Transposed, so that a column of the weight is contiguous: all are [K, N] in the order of rounding.
    step, zero = (_columns(one.repeat_interleave(columns // one.shape[1], 1), order, dtype) for one in grid[1:])
    chosen, kept = _columns(codes, order, dtype), _columns(fixed, order, torch.bool)
    left = _columns(weight, order, dtype)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = torch.empty_like(left[start:stop])
        for j in range(start, stop):
            best = levels[torch.bucketize(left[j] / step[j] + zero[j], between)]
            chosen[j] = torch.where(kept[j], chosen[j], best)
            errors[j - start] = (left[j] - (chosen[j] - zero[j]) * step[j]) / factor[j, j]
            left[j + 1 : stop].addr_(factor[j, j + 1 : stop], errors[j - start], alpha=-1)
        left[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    return torch.empty_like(chosen).index_copy_(0, order, chosen).t().contiguous().float()


def inverse_factor(hessian: Tensor) -> Tensor:
    """Return U, upper triangular, with U^T U = (H + DAMP * mean(diag H) * I)^-1.

    If rounding makes the damped matrix indefinite, ten times the damping is tried, four times at most.

    Raises:
        ValueError: No damping helped, or H is not finite.
    """
    mean = hessian.diagonal().mean()
    unit = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    unit *= torch.where(mean > 0, mean, torch.ones_like(mean))  # inputs that are all zero
    for attempt in range(_RETRIES):
        lower, info = torch.linalg.cholesky_ex(hessian + DAMP * 10**attempt * unit)
        if not info.item():
            upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not info.item() and upper.isfinite().all():
                return upper
    raise ValueError("the Hessian of the calibration inputs has no Cholesky factor; use other calibration text")


def _ends(weight: Tensor, grid: CodeGrid, both: bool) -> Tensor:
    """Mark the elements that determine a group's scale: bool [N, K].

    both: Mark the smallest and the largest value of each group; otherwise the largest magnitude.
    """
    values = weight.reshape(*grid.step.shape, -1)
    index = [values.argmin(-1, True), values.argmax(-1, True)] if both else [values.abs().argmax(-1, True)]
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, torch.cat(index, -1), True).view_as(weight)


def _without_master(
    scheme: Scheme, stored: dict[str, Tensor], master: Tensor, shape: Shape, shared: Tensor | None
) -> Tensor:
    """Mark the elements of groups that `master` does not quantize to: bool [N, K]."""
    again, _ = scheme.quantize(master, shared=shared)
    (_, step, zero), other = scheme.code_grid(stored, shape), scheme.code_grid(again, shape)
    codes = scheme.codes(stored, shape).float() != scheme.codes(again, shape).float()
    lost = codes.view(*step.shape, -1).any(-1) | (step != other.step) | (zero != other.zero)
    return lost.repeat_interleave(shape[1] // step.shape[1], 1)


def _columns(matrix: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] -> [K, N] of dtype, contiguous, in the given order of columns."""
    return matrix.to(dtype).t()[order].contiguous()
