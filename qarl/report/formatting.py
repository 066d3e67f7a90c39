"""Human-readable numbers. None and NaN become a dash."""

import math
from typing import TypeGuard

MISSING = "\u2013"  # an en dash


def _known(x: float | None) -> TypeGuard[float]:
    return x is not None and not math.isnan(x)


def _significant(x: float, digits: int) -> str:
    """Format `x` with that many significant digits, without exponent or trailing zeros."""
    if x == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(x))))
    text = f"{x:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def number(x: float | None, digits: int = 3) -> str:
    """Format with three significant digits and the full integer part; extreme values as 1.23e-05. Integers as is."""
    if not _known(x):
        return MISSING
    if isinstance(x, int):
        return f"{x:,}"
    if math.isinf(x):
        return "∞" if x > 0 else "-∞"
    if x != 0 and not 1e-4 <= abs(x) < 1e7:
        return f"{x:.{digits - 1}e}"
    return _significant(x, digits)


def seconds(x: float | None) -> str:
    """Format seconds as `12 ms`, `1.23 s`, `4 min 05 s`, `2 h 03 min`, `3 d 4 h`."""
    if not _known(x):
        return MISSING
    if x < 1:
        return f"{_significant(x * 1e3, 3)} ms"
    if x < 59.95:
        return f"{_significant(x, 3)} s"
    whole = round(x)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = whole // 60
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def gib(x: float | None) -> str:
    """Format `x` GiB."""
    return f"{_significant(x, 3)} GiB" if _known(x) else MISSING


def bytes_(x: float | None) -> str:
    """Format a size in the binary unit that leaves at most four digits before the point."""
    if not _known(x):
        return MISSING
    size = float(x)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{_significant(size, 3)} {unit}"
        size /= 1024
    return f"{_significant(size, 3)} TiB"


def percent(x: float | None) -> str:
    """Format the fraction `x` as a percentage with one decimal; only exact values read 0% or 100%."""
    if not _known(x):
        return MISSING
    value = x * 100
    text = f"{value:.1f}"
    if text in ("0.0", "-0.0") and value:
        text = f"{value:.2g}"
    elif text == "100.0" and value < 100:
        text = ">99.9"
    return f"{text.removesuffix('.0') if value in (0, 100) else text}%"


def interval(mean: float | None, low: float | None, high: float | None) -> str:
    """Format `0.42 [0.38, 0.46]` with precision by the width of the interval; only the mean without bounds."""
    if not _known(mean):
        return MISSING
    if not (_known(low) and _known(high)):
        return number(mean)
    sizes = [size for size in (high - low, abs(mean) / 10) if size > 0]
    decimals = min(6, max(2, *(-math.floor(math.log10(size)) for size in sizes))) if high > low else 3
    return f"{mean:.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"
