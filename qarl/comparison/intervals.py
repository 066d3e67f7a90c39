"""Means over windows of text with 95 % intervals (Student's t: there may be few windows)."""

import math
from collections.abc import Sequence

LEVEL = 0.95


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return (mean, low, high) of independent values. low and high are None for a single value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, None, None
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = t_quantile(count - 1) * deviation / math.sqrt(count)
    return mean, mean - half, mean + half


def t_quantile(freedom: int) -> float:
    """Return t with P(|T| < t) = 0.95 for an integer number of degrees of freedom >= 1."""
    low, high = 0.0, 16.0  # 12.7 for one degree of freedom, the widest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < LEVEL else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 if odd else 0, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
