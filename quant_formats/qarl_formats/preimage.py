"""Preimages under quantization: masters that quantize to given codes and scales.

Dequantized values are the obvious master, but rounding them again does not give the stored tensors back: the scale of
an int4 group is absmax / 7.5, and the absmax of dequantized values is 7 or 8 scales. So the ends of a group are moved
within their rounding cells until the group has the stored scale: to 7.5 scales for int4, 127.5 for int8, 448 for e4m3,
6 for e2m1. All other values stay dequantized.

Several candidates are quantized and compared, and each group keeps the first one that gives the stored bits. A group
for which there is none keeps its dequantized values. Such a group has no preimage, because quantization puts a code at
the end of the grid, and GPTQ and AWQ need not. The only other groups without a preimage are asymmetric, with a float32
scale and a range that ends within an ulp of a tie.

Codes are float32 [G, size], scales and zero points [G, 1]. Functions return the master, float32 [G, size], and whether
each group has a preimage, bool [G].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from qarl_kernels.nvfp4 import e2m1_values
from torch import Tensor

from qarl_formats import nvfp4, rounding
from qarl_formats.rounding import FP8, Grid

_ULPS = (0, -1, 1, -2, 2)  # -1 serves groups whose largest code is -7, which at 7.5 scales would become -8
_MINUS_ZERO = -(2.0**-12)  # in scales: rounds to -0 in e4m3 (down to -2^-10) and in e2m1 (down to -0.25)
_SMALLEST = 2.0**-149
_CHUNK = 2**22  # values at a time: temporaries stay in the cache

Found = tuple[Tensor, Tensor]
Candidate = Callable[..., Tensor]


def symmetric(codes: Tensor, scale: Tensor, grid: Grid) -> Found:
    """Preimage under `rounding.symmetric`: int4, int8, or e4m3 codes if `grid` is FP8."""

    def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
        scaled, found, _ = rounding.symmetric(values, grid, scale.dtype)
        return (rounding.e4m3(scaled) if grid is FP8 else rounding.integers(scaled, grid)).float(), found

    def plain(codes: Tensor, scale: Tensor) -> Tensor:
        return _dequantized(codes, scale.float()) if grid is FP8 else codes * scale.float()

    def ending(ulps: int) -> Candidate:
        return lambda codes, scale: _with_absmax(plain(codes, scale), codes, _moved(scale.float() * grid.divisor, ulps))

    def zeros(codes: Tensor, scale: Tensor) -> Tensor:  # of groups whose scale underflowed; e4m3 has -0 and +0
        return torch.where(codes.signbit(), -_SMALLEST, 0.0)

    return _search((codes, scale), [*map(ending, _ULPS), plain, zeros], quantize, plain)


def asymmetric(codes: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Found:
    """Preimage under `rounding.asymmetric`. zero_point: integers in float32."""
    steps = grid.highest - grid.lowest

    def quantize(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scaled, found, zero, _ = rounding.asymmetric(values, grid, scale.dtype)
        return rounding.integers(scaled, grid).float(), found, zero + 0.0  # -0 becomes 0

    def plain(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (codes - zero) * scale.float()

    def spanning(ulps: int, from_low: bool) -> Candidate:
        """Correct one end, because a float32 scale times the number of steps is rounded."""

        def candidate(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
            values, span = plain(codes, scale, zero), _moved(scale.float() * steps, ulps)
            low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
            return _with_range(values, low, low + span) if from_low else _with_range(values, high - span, high)

        return candidate

    def at_tie(low_code: float) -> Candidate:
        """Begin the range at a tie of the zero point, under a scale that was rounded up: codes -7..7 or -8..6."""

        def candidate(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
            exact = scale.float() * (1 - 2.0**-13)
            low = (low_code - zero) * exact
            return _with_range(plain(codes, scale, zero), low, low + exact * steps)

        return candidate

    spans = [spanning(ulps, from_low) for ulps in _ULPS for from_low in (True, False)]
    ties = [at_tie(grid.lowest + half - half * 2.0**-14) for half in (0.5, -0.5)]
    return _search((codes, scale, zero_point), [plain, *spans, *ties], quantize, plain)


def tensor_group(codes: Tensor, scale: Tensor, global_scale: Tensor) -> Found:
    """Preimage under `nvfp4.quantize_nvfp4`, with the tensor's `global_scale` float32 [1].

    If a group has the largest scale and a code of 6, the absmax of the tensor makes `global_scale` again, provided that
    any absmax does.
    """
    absmax = _absmax_of_global(global_scale)

    def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
        packed, found = nvfp4.quantize_nvfp4(values, global_scale)
        return e2m1_values(packed), found

    def plain(codes: Tensor, scale: Tensor) -> Tensor:
        return _dequantized(codes, scale.float() / global_scale)

    def ending(four: float, three: float) -> Candidate:
        """four, three: magnitude in steps of a largest code of 4 or 3."""

        def candidate(codes: Tensor, scale: Tensor) -> Tensor:
            largest = codes.abs().amax(-1, keepdim=True).clamp(min=0.5)
            end = torch.where(largest == 4, four, torch.where(largest == 3, three, largest))
            end = end * (scale.float() / global_scale)
            whole = (scale.float() == FP8.highest) & (largest == nvfp4.E2M1_MAX)
            return _with_absmax(plain(codes, scale), codes, torch.where(whole, absmax, end))

        return candidate

    def zeros(codes: Tensor, scale: Tensor) -> Tensor:  # for a tensor of zeros; codes may be -0
        return torch.where(codes.signbit(), -(2.0**-126), 0.0)

    # Subnormal scales are coarse: a largest code of 4 or 3 gives its scale if it lies at the end of its cell.
    candidates = [ending(4.0, 3.0), ending(4.999, 3.499), zeros]
    return _search((codes, scale), candidates, quantize, plain)


def _search(
    stored: tuple[Tensor, ...],
    candidates: Sequence[Candidate],
    quantize: Callable[..., tuple[Tensor, ...]],
    plain: Candidate,
) -> Found:
    """Return per group the first candidate that quantizes to `stored`, else `plain`."""
    rows = max(1, _CHUNK // max(1, stored[0].shape[1]))
    chunks = zip(*(tensor.split(rows) for tensor in stored), strict=True)
    found = [_search_chunk(chunk, candidates, quantize, plain) for chunk in chunks]
    values, exact = zip(*found, strict=True)
    return torch.cat(values), torch.cat(exact)


def _search_chunk(
    stored: tuple[Tensor, ...],
    candidates: Sequence[Candidate],
    quantize: Callable[..., tuple[Tensor, ...]],
    plain: Candidate,
) -> Found:
    values = candidates[0](*stored)
    exact = _same(quantize(values), stored)
    for candidate in (*candidates[1:], plain):
        left = (~exact).nonzero().squeeze(1)
        if not len(left):
            break
        wanted = tuple(_rows(tensor, left) for tensor in stored)
        values[left] = candidate(*wanted)
        exact[left] = _same(quantize(values[left]), wanted)
    return values, exact


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor.view(torch.uint8)[index].view(tensor.dtype)  # torch cannot index float8 on every device


def _same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> Tensor:
    """Compare rows of tensors [G, any] bit for bit, so that +0 and -0 differ: bool [G]."""
    same = [(_integers(a) == _integers(b)).all(1) for a, b in zip(found, wanted, strict=True)]
    return torch.stack(same).all(0)


def _integers(tensor: Tensor) -> Tensor:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    return tensor.flatten().view(kind).view(tensor.shape)


def _dequantized(codes: Tensor, step: Tensor) -> Tensor:
    """Return codes * step. Code -0 becomes a small negative number, because a master of -0.0 quantizes to +0."""
    return torch.where((codes == 0) & codes.signbit(), _MINUS_ZERO, codes).mul_(step)


def _with_absmax(values: Tensor, codes: Tensor, absmax: Tensor) -> Tensor:
    """Clamp values to +-absmax and move the largest one there."""
    (high, top), (low, bottom) = codes.max(-1, keepdim=True), codes.min(-1, keepdim=True)
    upper = high >= -low  # of 7 and -7, 7: at 7.5 scales, -7 would become -8
    index = torch.where(upper, top, bottom)
    end = torch.where(torch.maximum(high, -low) > 0, torch.where(upper, absmax, -absmax), values.gather(-1, index))
    return values.clamp_(-absmax, absmax).scatter_(-1, index, end)


def _with_range(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Clamp values to low..high, widened to 0, and move the smallest and the largest one to an end that is not 0."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    clamped = values.clamp(low, high)
    for end, index in ((low, values.argmin(-1, keepdim=True)), (high, values.argmax(-1, keepdim=True))):
        clamped.scatter_(-1, index, torch.where(end != 0, end, clamped.gather(-1, index)))
    return clamped


def _moved(value: Tensor, ulps: int) -> Tensor:
    """Move positive float32 numbers by so many units in the last place."""
    return (value.view(torch.int32) + ulps).view(torch.float32)


def _absmax_of_global(global_scale: Tensor) -> Tensor:
    """Return an absmax float32 [1] whose `global_scale_of` is this scale; if there is none, one that is close."""
    about = nvfp4.E2M1_MAX * FP8.highest / global_scale
    near = [_moved(about, ulps) for ulps in (0, 1, -1, 2, -2, 3, -3, 4, -4)]
    return next((one for one in near if torch.equal(nvfp4.global_scale_of([one[0]]), global_scale)), about)
