"""Measure the time of a call on the device, and check its result."""

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.errors import TritonError

T = TypeVar("T")
Row = dict[str, Any]
Call = Callable[[], Tensor]

FLUSH_BYTES = 256 << 20  # more than any L2 cache
TOLERANCE = 1e-2  # relative Frobenius error: correct bf16 outputs have at most 2e-3, a wrong scale or tile has more
CHECKED_ROWS = 256
CYCLES_PER_SECOND = 2e9  # approximate clock of a GPU: `torch.cuda._sleep` counts cycles


# What a kernel may raise for a shape, device or version that it does not support. Kernels of other libraries raise all
# of these. A case that fails becomes a line of the report and does not end the run.
ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ImportError, KeyError, TritonError)


class Wrong(ValueError):
    """A kernel's result is not the product of its operands."""


class Late(RuntimeError):
    """The host queued calls more slowly than the device ran them, so a time would be the host's."""


def reason(error: BaseException) -> str:
    """Return the type and the first line of an error, for the report."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def build_all(builders: dict[str, Callable[[], T]]) -> tuple[dict[str, T], dict[str, str]]:
    """Return the results of the builders that succeeded, and the reasons of those that failed, by name."""
    made, skipped = {}, {}
    for who, build in builders.items():
        try:
            made[who] = build()
        except ERRORS as error:
            skipped[who] = reason(error)
    return made, skipped


class Stopwatch:
    """Measures calls on the current device with a cold L2 cache, all queued before the first of them runs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def microseconds(self, call: Callable[[], object], reps: int) -> float:
        """Return the median time of a call. Raises Late if the device waited for the host too often."""
        call()
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        call()
        host = time.perf_counter() - begin
        torch.cuda.synchronize(self.device)
        times: list[float] = []
        for patience in (1.5, 6.0, 24.0):  # a pause of the host (garbage collection, say) may be longer than the sleep
            torch.cuda._sleep(int(min(patience * reps * (host + 30e-6), 0.1) * CYCLES_PER_SECOND))
            queued = [self._queue(call) for _ in range(reps)]
            torch.cuda.synchronize(self.device)
            times += [1e3 * start.elapsed_time(end) for start, end, ahead in queued if ahead]
            if len(times) >= reps:
                return statistics.median(times)
        raise Late(f"the device waited for the host in {3 * reps - len(times)} of {3 * reps} calls; nothing was timed")

    def _queue(self, call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event, bool]:
        """Queue a call; return the events around it, and whether the device was still busy with earlier work."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        start.record()
        call()
        end.record()
        return start, end, not start.query()


def poison(m: int, n: int, device: torch.device) -> None:
    """Leave NaN in the memory that an output of (m, n) is likely to get, because torch's allocator reuses blocks."""
    blocks = [torch.full((m, n), torch.nan, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32)]
    del blocks


def picked_rows(m: int, device: torch.device, most: int = CHECKED_ROWS) -> Tensor:
    """Return int64 indices of at most `most` of m rows, evenly spread, with the first and the last."""
    return torch.linspace(0, m - 1, min(m, most), dtype=torch.float64, device=device).round().long()


def check(
    result: Tensor, expected: Tensor, rows: Tensor, shape: tuple[int, int], tolerance: float = TOLERANCE
) -> float:
    """Return the relative Frobenius error of result[rows] against `expected`.

    Raises:
        Wrong: `result` has another shape or a value that is not finite, or the error is not below the tolerance.
    """
    if tuple(result.shape) != shape:
        raise Wrong(f"wrong shape {tuple(result.shape)}, not {shape}")
    if not result.isfinite().all():
        raise Wrong(f"wrong: {int(result.isfinite().logical_not().sum())} values are not finite")
    error = float((result[rows].float() - expected).norm() / expected.norm())
    if not error < tolerance:
        raise Wrong(f"wrong: relative error {error:.1e}")
    return error


def measured(
    make: Callable[[], Call],
    stopwatch: Stopwatch,
    reps: int,
    flops: float,
    expected: Tensor,
    rows: Tensor,
    shape: tuple[int, int],
    tolerance: float = TOLERANCE,
) -> Row:
    """Check a kernel and time it; return `us`, `tflops` and `relative_error`, or `skipped`, the reason.

    Args:
        make: Returns the call to check and time.
        stopwatch: Times it.
        reps: Number of timed calls; at most 7 are made for 4096 rows and more, because long calls vary less.
        flops: Floating-point operations of one call.
        expected: float32 values of the result's `rows`.
        rows: Indices of the rows to check, see `picked_rows`.
        shape: Shape of the result.
        tolerance: Largest relative error.
    """
    try:
        call = make()
        poison(*shape, stopwatch.device)
        error = check(call(), expected, rows, shape, tolerance)
        us = stopwatch.microseconds(call, reps if shape[0] < 4096 else min(reps, 7))
    except ERRORS as failure:  # also qarl's kernels: one shape must not end the run
        return {"skipped": reason(failure)}
    return {"us": us, "tflops": flops / us / 1e6, "relative_error": error}
