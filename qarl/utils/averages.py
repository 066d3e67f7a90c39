"""Mean and standard deviation that do not overflow for finite floats. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

_SCALE = 2.0**-100  # exact; sums of scaled values cannot overflow


def mean(values: Iterable[float]) -> float:
    """Return the mean of at least one value, bit-identical to `statistics.fmean` unless that overflows.

    NaN if the values contain both inf and -inf.
    """
    values = list(values)
    try:
        return statistics.fmean(values)
    except OverflowError:
        return statistics.fmean([value * _SCALE for value in values]) / _SCALE
    except ValueError:  # infinities of both signs
        return math.nan


def deviation(values: Iterable[float]) -> float:
    """Return the population standard deviation of at least one value, bit-identical to `statistics.pstdev`.

    NaN if a value is not finite. Does not overflow for finite values.
    """
    values = list(values)
    return statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan


def mean_of(records: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a metric over the records that have it; None if none has."""
    values = [record[name] for record in records if record.get(name) is not None]
    return mean(values) if values else None
