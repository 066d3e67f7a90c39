"""GPTQ: codes that keep the outputs of a linear layer, instead of the nearest ones (Frantar et al. 2022, algorithm 1).

For inputs X [T, K] of a layer with weight W [N, K], GPTQ minimizes ||X W^T - X W_deq^T||, which depends on X through
H = X^T X only. Columns are rounded one after the other. The error of each is compensated by the columns that are not
rounded yet:

    e_j = (w_j - deq(code_j)) / U_jj        U: upper Cholesky factor of (H + damp * mean(diag H) * I)^-1
    w_k = w_k - e_j U_jk                    for the columns k that follow

Columns with large inputs come first ("activation order"), while the most columns are left to compensate.

Scales and zero points are those of round-to-nearest. A scale is a function of the ends of its group (absmax / 7.5 for
int4), so a master exists only if the codes reach these ends (`qarl_formats.preimage`). The elements at the ends
therefore keep their nearest codes, and other columns compensate their errors too. A group that does not reach an end of
the grid (zeros, or a scale at the smallest number of its dtype) keeps all its nearest codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_formats.scheme import CodeGrid, Scheme

DAMP = 0.01
BLOCK = 128  # columns whose updates of all later columns are one matrix product
_RETRIES = 4
_NEAR = 0.9  # of the end of the grid; rounding a scale moves the ends of a group by 1/16 (e4m3) at most


@torch.no_grad()
def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    shared: Tensor | None = None,
    damp: float = DAMP,
    block: int = BLOCK,
) -> dict[str, Tensor]:
    """Quantize a weight so that its products with calibration inputs change little.

    Args:
        weight: float32 [N, K], finite, of a shape that fits the scheme; not changed.
        hessian: X^T X of the inputs, [K, K]; its dtype (float32 or float64) is that of the updates.
        scheme: One with `chooses_codes`.
        shared: See `Scheme.quantize`.
        damp: Fraction of the mean of H's diagonal that is added to the diagonal.
        block: Columns per block; affects speed and rounding errors only.

    Returns:
        The stored tensors by suffix.
    """
    shape, dtype = (weight.shape[0], weight.shape[1]), hessian.dtype
    stored, _ = scheme.quantize(weight.contiguous(), shared=shared)
    order = hessian.diagonal().argsort(descending=True, stable=True)
    grid = scheme.code_grid(stored, shape)
    nearest = scheme.codes(stored, shape).float()
    fixed = _fixed(weight, grid, ends=2 if "weight_zero_point" in stored else 1)
    # Transposed, so that a column of the weight is contiguous: all are [K, N] in the order of rounding.
    step, zero = (_columns(one.repeat_interleave(shape[1] // one.shape[1], 1), order, dtype) for one in grid[1:])
    codes, fixed = _columns(nearest, order, dtype), _columns(fixed, order, torch.bool)
    left = _columns(weight, order, dtype)
    levels = grid.levels.to(dtype)
    between = (levels[1:] + levels[:-1]) / 2
    factor = inverse_factor(hessian[order][:, order], damp)
    for start in range(0, shape[1], block):
        stop = min(start + block, shape[1])
        errors = torch.empty_like(left[start:stop])
        for j in range(start, stop):
            chosen = levels[torch.bucketize(left[j] / step[j] + zero[j], between)]
            codes[j] = torch.where(fixed[j], codes[j], chosen)
            errors[j - start] = (left[j] - (codes[j] - zero[j]) * step[j]) / factor[j, j]
            left[j + 1 : stop].addr_(factor[j, j + 1 : stop], errors[j - start], alpha=-1)
        left[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    back = torch.empty_like(codes).index_copy_(0, order, codes)
    return scheme.with_codes(stored, back.t().contiguous().float())


def inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """Return U, upper triangular, with U^T U = (H + damp * mean(diag H) * I)^-1.

    If rounding makes the damped matrix indefinite, ten times the damping is tried, four times at most.

    Raises:
        ValueError: No damping helped, or H is not finite.
    """
    mean = hessian.diagonal().mean()
    unit = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    unit *= torch.where(mean > 0, mean, torch.ones_like(mean))  # inputs that are all zero
    for attempt in range(_RETRIES):
        lower, info = torch.linalg.cholesky_ex(hessian + damp * 10**attempt * unit)
        if not info.item():
            upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not info.item() and upper.isfinite().all():
                return upper
    raise ValueError("the Hessian of the calibration inputs has no Cholesky factor; use other calibration text")


def _fixed(weight: Tensor, grid: CodeGrid, ends: int) -> Tensor:
    """Whether an element keeps its nearest code: bool [N, K].

    ends: 1 if the largest magnitude of a group makes its scale, 2 if the smallest and the largest value do.
    """
    values = weight.reshape(*grid.step.shape, -1)
    rows = [values.argmin(-1, True), values.argmax(-1, True)] if ends == 2 else [values.abs().argmax(-1, True)]
    index = torch.cat(rows, -1)
    scaled = values.gather(-1, index) / grid.step[..., None] + grid.zero[..., None]
    reached = ((scaled <= _NEAR * grid.levels[0]) | (scaled >= _NEAR * grid.levels[-1])).any(-1, keepdim=True)
    fixed = torch.zeros_like(values, dtype=torch.bool).scatter_(-1, index, True)
    return (fixed | ~reached).view_as(weight)


def _columns(matrix: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] -> [K, N] of dtype, contiguous, in the given order of columns."""
    return matrix.to(dtype).t()[order].contiguous()
