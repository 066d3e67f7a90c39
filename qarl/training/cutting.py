"""Where a minibatch is cut into micro-batches, by tokens alone or also so that each of them is as much work, and which
rank runs which.

Responses stand in a fixed order, those to one prompt side by side; a micro-batch is a run of neighbours, and runs a
prompt that they share once. No cut changes what a response's forward gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")
Cut = Callable[[Sequence["Response"], int], list[int]]

EVEN_LENGTH = 8192
"""Tokens of context at which attention takes a token as long as all products do; of models of 1 to 8 billion parameters
it is about that on a GPU, and the cut asks for no more."""


@dataclass(frozen=True)
class Response:
    """group: whose prompt it answers. prompt, length: tokens."""

    group: int
    prompt: int
    length: int


def by_tokens(responses: Sequence[Response], max_tokens: int) -> list[int]:
    """Where micro-batches end: each is filled until the next response would run it past `max_tokens` tokens."""
    ends: list[int] = []
    while (ends[-1] if ends else 0) < len(responses):
        ends.append(_furthest(responses, ends[-1] if ends else 0, max_tokens))
    return ends


def by_work(responses: Sequence[Response], max_tokens: int) -> list[int]:
    """The same number of micro-batches as `by_tokens` has, within the same budget, and of similar work.

    The last one is not what is left over, and long responses, whose tokens attend to more, come in smaller ones. One
    after the other takes its share of the work that is left, as near to it as the budget and the number of parts allow.
    A prompt that a cut has run twice counts against that cut.
    """
    count = len(responses)
    furthest = [_furthest(responses, start, max_tokens) for start in range(count)]
    parts = [0] * (count + 1)  # that the responses from here on need
    for start in reversed(range(count)):
        parts[start] = 1 + parts[furthest[start]]
    left = [0.0] * (count + 1)  # work from here on, in one micro-batch
    for start in reversed(range(count)):
        left[start] = left[start + 1] + _added_work(responses, start)
    ends: list[int] = []
    while (ends[-1] if ends else 0) < count:
        start = ends[-1] if ends else 0
        again = _prompt_work(responses[start]) if _shared(responses, start) else 0.0
        share = (again + left[start]) / parts[start]

        def distance(end: int, start: int = start, again: float = again, share: float = share) -> float:
            repeated = _prompt_work(responses[end]) if _shared(responses, end) else 0.0
            return abs(again + left[start] - left[end] - share) + repeated

        # Fewer responses than these and the rest would need one part more.
        allowed = [end for end in range(start + 1, furthest[start] + 1) if parts[end] < parts[start]]
        ends.append(min(allowed, key=distance))
    return ends


def for_ranks(cut: Cut, responses: Sequence[Response], max_tokens: int, ranks: int) -> list[int]:
    """Where micro-batches end that several ranks share: `cut` within the budget, or within a smaller one where all
    rounds together (see `deal`) are less work.

    A smaller budget gives every rank a micro-batch in the last round too, as far as there are responses.
    """
    ends = cut(responses, max_tokens)
    if ranks == 1 or len(ends) % ranks == 0:
        return ends
    wanted = min(len(responses), math.ceil(len(ends) / ranks) * ranks)
    low, high = 1, max_tokens  # the largest budget that cuts into as many as are wanted
    while low < high:
        middle = (low + high + 1) // 2
        if len(by_tokens(responses, middle)) >= wanted:
            low = middle
        else:
            high = middle - 1
    smaller = cut(responses, low)
    return min((ends, smaller), key=lambda found: _of_all_rounds(responses, found, ranks))


def deal(parts: Sequence[T], works: Sequence[float], ranks: int) -> list[list[T | None]]:
    """Rounds of micro-batches, one for each rank in a round; None where a rank has none, in the last round alone.

    works: of the parts. Ranks wait for one another in every round: the longest ones come first and together, so that
    all rounds take as long as they have to and no more. In a round the longest goes to the rank with the least work so
    far. Ties are decided by index. One rank has its parts in their order.
    """
    if ranks == 1:
        return [[part] for part in parts]
    order = sorted(range(len(parts)), key=lambda i: (-works[i], i))
    loads = [0.0] * ranks
    rounds = []
    for start in range(0, len(order), ranks):
        dealt: list[T | None] = [None] * ranks
        by_load = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        for index, rank in zip(order[start : start + ranks], by_load, strict=False):
            dealt[rank] = parts[index]
            loads[rank] += works[index]
        rounds.append(dealt)
    return rounds


def work(responses: Sequence[Response]) -> float:
    """Of one micro-batch: 1 a token, and attention over what stands before it."""
    return sum(_added_work(responses, at) for at in range(len(responses)))


def _of_all_rounds(responses: Sequence[Response], ends: Sequence[int], ranks: int) -> float:
    works = sorted((work(responses[start:end]) for start, end in pairwise([0, *ends])), reverse=True)
    return sum(works[::ranks])


def _furthest(responses: Sequence[Response], start: int, max_tokens: int) -> int:
    """The end of the longest run of neighbours from `start` within the budget, of one response at least."""
    tokens = responses[start].prompt + responses[start].length
    end = start + 1
    while end < len(responses):
        tokens += responses[end].length + (0 if _shared(responses, end) else responses[end].prompt)
        if tokens > max_tokens:
            break
        end += 1
    return end


def _shared(responses: Sequence[Response], at: int) -> bool:
    """Whether the response has its prompt from its left neighbour."""
    return 0 < at < len(responses) and responses[at - 1].group == responses[at].group


def _work(first: int, count: int) -> float:
    """Of `count` tokens behind `first` others: 1 a token, and attention over what stands before it."""
    return count * (1.0 + (first + count / 2) / EVEN_LENGTH)


def _prompt_work(response: Response) -> float:
    return _work(0, response.prompt)


def _added_work(responses: Sequence[Response], at: int) -> float:
    """What the response adds to a micro-batch that has its left neighbour."""
    response = responses[at]
    return _work(response.prompt, response.length) + (0.0 if _shared(responses, at) else _prompt_work(response))
