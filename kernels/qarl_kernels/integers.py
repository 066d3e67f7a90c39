"""Integer arithmetic for grids and tiles on the host, where Triton's functions of these names take microseconds."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; b positive."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 1 for n up to 1."""
    return 1 << max(0, n - 1).bit_length()
