"""Means and deviations of any floats: what is finite has a finite mean, though its sum may be none. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

_SCALE = 2.0**-100  # exact, and sums of as many values as fit in memory then fit a float


def mean(values: Iterable[float]) -> float:
    """As `statistics.fmean`, to the bit wherever that has a result. NaN for values that have no mean (inf and -inf).

    At least one value.
    """
    values = list(values)
    try:
        return statistics.fmean(values)
    except OverflowError:
        return statistics.fmean([value * _SCALE for value in values]) / _SCALE
    except ValueError:  # infinities of both signs
        return math.nan


def deviation(values: Iterable[float]) -> float:
    """The population's standard deviation, as `statistics.pstdev` gives it, to the bit wherever that has a result.

    NaN where a value is not finite. At least one value.
    """
    values = list(values)
    return statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan
