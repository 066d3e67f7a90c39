"""Where a minibatch is cut into micro-batches: by tokens alone, or also so that each of them is as much work.

Responses stand in a fixed order, those to one prompt side by side; a micro-batch is a run of neighbours, and runs a
prompt that they share once. No cut changes what a response's forward gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
