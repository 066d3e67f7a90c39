"""Micro-batching: split a minibatch, and assign the micro-batches to ranks.

Responses have a fixed order, in which responses to the same prompt are adjacent. A micro-batch consists of adjacent
responses and computes a shared prompt once. The result of a response's forward does not depend on the split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

EVEN_LENGTH = 8192
"""Context length at which attention takes as long as all matrix products of a token. An approximation for models of 1
to 8 billion parameters on a GPU, accurate enough for balancing."""


@dataclass(frozen=True)
class Response:
    """Size of a response."""

    prompt_number: int  # equal for responses to the same prompt
    prompt: int  # tokens
    length: int  # tokens


def by_tokens(responses: Sequence[Response], max_tokens: int) -> list[int]:
    """Return the ends of micro-batches that are each filled up to `max_tokens` tokens."""
    ends: list[int] = []
    end = 0
    while end < len(responses):
        end = _furthest(responses, end, max_tokens)
        ends.append(end)
    return ends


def by_work(responses: Sequence[Response], max_tokens: int) -> list[int]:
    """Return the ends of as many micro-batches as `by_tokens`, within the same budget, but with similar work.

    This avoids a small remainder at the end, and makes micro-batches of long responses smaller, because their tokens
    attend to more. Each micro-batch takes an equal share of the remaining work, as closely as the budget and the number
    of micro-batches allow. A split within a group costs the work of repeating the prompt.
    """
    count = len(responses)
    furthest = [_furthest(responses, start, max_tokens) for start in range(count)]
    parts = [0] * (count + 1)  # micro-batches needed from each response on
    for start in reversed(range(count)):
        parts[start] = 1 + parts[furthest[start]]
    left = [0.0] * (count + 1)  # work from each response on, if in one micro-batch
    for start in reversed(range(count)):
        left[start] = left[start + 1] + _added_work(responses, start)
    ends: list[int] = []
    start = 0
    while start < count:
        again = _prompt_work(responses[start]) if _shared(responses, start) else 0.0
        share = (again + left[start]) / parts[start]

        def distance(end: int, start: int = start, again: float = again, share: float = share) -> float:
            repeated = _prompt_work(responses[end]) if _shared(responses, end) else 0.0
            return abs(again + left[start] - left[end] - share) + repeated

        # A smaller micro-batch would leave a rest that needs one more part.
        allowed = [end for end in range(start + 1, furthest[start] + 1) if parts[end] < parts[start]]
        start = min(allowed, key=distance)
        ends.append(start)
    return ends


def micro_batch_ends(responses: Sequence[Response], max_tokens: int, ranks: int, even: bool) -> list[int]:
    """Return where micro-batches end: at the token budget, or at a smaller one if that is faster over all ranks.

    A smaller budget can give every rank a micro-batch in the last round too, if there are enough responses.

    Args:
        responses: Sizes, in order.
        max_tokens: Token budget of a micro-batch.
        ranks: Number of ranks that share the micro-batches.
        even: Balance the work of micro-batches instead of filling each to the budget.

    Returns:
        End index of each micro-batch.
    """
    split = by_work if even else by_tokens
    ends = split(responses, max_tokens)
    if ranks == 1 or len(ends) % ranks == 0:
        return ends
    wanted = min(len(responses), math.ceil(len(ends) / ranks) * ranks)
    low, high = 1, max_tokens  # binary search for the largest budget that gives that many micro-batches
    while low < high:
        middle = (low + high + 1) // 2
        if len(by_tokens(responses, middle)) >= wanted:
            low = middle
        else:
            high = middle - 1
    smaller = split(responses, low)
    return min((ends, smaller), key=lambda found: _work_of_rounds(responses, found, ranks))


def assign(parts: Sequence[T], works: Sequence[float], ranks: int) -> list[list[T | None]]:
    """Assign micro-batches to ranks in rounds of one per rank.

    Ranks wait for each other in every round, so the micro-batches with the most work run together, first. Within a
    round, the largest goes to the rank with the least work so far; ties are broken by index. A single rank runs its
    parts in order.

    Args:
        parts: The micro-batches.
        works: Work of each micro-batch.
        ranks: Number of ranks.

    Returns:
        One list per round with an entry per rank: a micro-batch, or None in the last round.
    """
    if ranks == 1:
        return [[part] for part in parts]
    order = sorted(range(len(parts)), key=lambda i: (-works[i], i))
    loads = [0.0] * ranks
    rounds = []
    for start in range(0, len(order), ranks):
        assigned: list[T | None] = [None] * ranks
        by_load = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        for index, rank in zip(order[start : start + ranks], by_load, strict=False):
            assigned[rank] = parts[index]
            loads[rank] += works[index]
        rounds.append(assigned)
    return rounds


def work(responses: Sequence[Response]) -> float:
    """Return the work of a micro-batch: 1 per token plus attention over the previous tokens."""
    return sum(_added_work(responses, at) for at in range(len(responses)))


def _work_of_rounds(responses: Sequence[Response], ends: Sequence[int], ranks: int) -> float:
    works = sorted((work(responses[start:end]) for start, end in pairwise([0, *ends])), reverse=True)
    return sum(works[::ranks])


def _furthest(responses: Sequence[Response], start: int, max_tokens: int) -> int:
    """Return the end of the longest run of responses from `start` within the budget, at least one response."""
    tokens = responses[start].prompt + responses[start].length
    end = start + 1
    while end < len(responses):
        tokens += responses[end].length + (0 if _shared(responses, end) else responses[end].prompt)
        if tokens > max_tokens:
            break
        end += 1
    return end


def _shared(responses: Sequence[Response], at: int) -> bool:
    """Return whether the previous response has the same prompt."""
    return 0 < at < len(responses) and responses[at - 1].prompt_number == responses[at].prompt_number


def _work(first: int, count: int) -> float:
    """Work of `count` tokens after `first` others."""
    return count * (1.0 + (first + count / 2) / EVEN_LENGTH)


def _prompt_work(response: Response) -> float:
    return _work(0, response.prompt)


def _added_work(responses: Sequence[Response], at: int) -> float:
    """Return the work that a response adds to a micro-batch that contains the previous response."""
    response = responses[at]
    return _work(response.prompt, response.length) + (0.0 if _shared(responses, at) else _prompt_work(response))
