"""A small set of cases in which every two values of two parameters meet."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of one value per axis, in a fixed order, that contain every pair of values of two axes."""
    values = [list(axis) for axis in axes]
    candidates = [tuple(enumerate(places)) for places in product(*(range(len(axis)) for axis in values))]
    missing = {pair for candidate in candidates for pair in combinations(candidate, 2)}
    chosen = []
    while missing:
        best = max(candidates, key=lambda candidate: sum(pair in missing for pair in combinations(candidate, 2)))
        missing.difference_update(combinations(best, 2))
        chosen.append(tuple(values[axis][place] for axis, place in best))
    return chosen
