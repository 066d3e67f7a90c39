"""Sums in the order of ranks, rows of all ranks, maxima: on real processes that talk through gloo, and alone."""

from functools import cache
from typing import Any

import exchange_cases
import pytest
from ranks import run_ranks


@cache
def found_on(count: int) -> list[dict[str, Any]]:
    """What each of so many ranks found; 0: without a group."""
    return run_ranks(count, f"{exchange_cases.__file__}:everything") if count else [exchange_cases.everything(None)]


@pytest.mark.parametrize("count", [0, 2, 3])
def test_sums_are_those_in_the_order_of_ranks(count: int) -> None:
    differing = sum(one["differing"] for one in found_on(count))
    assert differing > 100 if count == 3 else differing == 0  # two numbers have one sum


@pytest.mark.parametrize("count", [0, 2, 3])
def test_bytes_of_several_messages_under_way(count: int) -> None:
    whole = sum(4 * exchange_cases.values_of(shape, 0, 0).numel() for shape in exchange_cases.SHAPES)
    for kind in ("seed 7", "seed 8", "seed 9"):
        for way in ("sent", "received"):
            total = sum(one["several"][way].get(kind, 0) for one in found_on(count))
            assert total == whole * max(count - 1, 0), (kind, way)


@pytest.mark.parametrize("count", [0, 2, 3])
def test_bytes_of_rows_of_all_ranks(count: int) -> None:
    each = sum(
        2 * 4 * dtype.itemsize * exchange_cases.values_of(shape, 0, 0).numel()
        for shape in exchange_cases.SHAPES
        for dtype in exchange_cases.DTYPES
    )
    for way in ("sent", "received"):
        assert sum(one["gathers"][way].get("codes", 0) for one in found_on(count)) == each * max(count - 1, 0), way


@pytest.mark.parametrize("count", [0, 2, 3])
def test_tensors_that_are_gathered_together_are_one_message(count: int) -> None:
    for kind, first in found_on(count)[0]["together"].items():
        of_ranks = [one["together"][kind] for one in found_on(count)]
        assert sum(received for received, _, _ in of_ranks) == first[1] * max(count - 1, 0), kind
        assert all(parts in ((1, count - 1, 0) if count else (0,)) for _, _, parts in of_ranks), kind


def test_maxima() -> None:
    assert [one["maxima"] for one in found_on(3)] == [[1.0, 2.0, 0.5, float("inf")]] * 3


@pytest.mark.parametrize("count", [0, 2, 3])
def test_moves_from_any_rank_to_any(count: int) -> None:
    sent, received = (sum(one["moves"][way] for one in found_on(count)) for way in ("sent", "received"))
    pairs = [(source, other) for source in range(count) for other in range(count) if source != other]
    assert sent == received == sum(3 * (source + 1) * (other + 2) for source, other in pairs)
