"""Floating-point operations that a model needs: its products and attention, and nothing done twice. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

BACKWARD = 2  # of a forward's: each product gives the gradient of its input and of its weight


class Shape(Protocol):
    """What `qarl.config.architecture.Architecture` knows of a model."""

    @property
    def multiplied_parameters(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def forward_flops(
    shape: Shape,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    windows: Sequence[int | None] | None = None,
) -> float:
    """Of the log-probs of responses, as `Policy.logprobs` packs them: neighbours with the same prompt share it.

    2 for each weight of a linear layer that a token goes through, 2 for each weight of the output layer and response
    token, and 4 x heads x head size for each pair of a query and a key that it sees. windows: of each layer, the tokens
    that a query sees, None for all; None: no layer has one.
    """
    tokens = predicted = 0
    stretches: list[tuple[int, int]] = []  # of queries: tokens before them, and how many they are
    before: Sequence[int] | None = None
    for prompt, response in zip(prompts, responses, strict=True):
        known, run = len(prompt), len(response) - 1  # the last token of a response predicts nothing
        if prompt != before:
            tokens += known
            stretches.append((0, known))
            before = prompt
        tokens += run
        predicted += len(response)
        stretches.append((known, run))
    linears = 2.0 * shape.multiplied_parameters * tokens
    head = 2.0 * shape.vocab_size * shape.hidden_size * predicted
    layers = Counter(windows or [None] * shape.num_layers)
    pairs = sum(count * sum(_pairs(*stretch, window) for stretch in stretches) for window, count in layers.items())
    return linears + head + 4.0 * shape.num_heads * shape.head_dim * pairs


def _pairs(first: int, count: int, window: int | None) -> int:
    """Keys seen by `count` queries behind `first` tokens, each by itself and `window` tokens at most."""
    seen = count * first + count * (count + 1) // 2
    hidden = 0 if window is None else first + count - window  # of the last query
    if hidden <= 0:
        return seen
    several = min(count, hidden)  # queries from which some keys are hidden, one more from each
    return seen - several * hidden + several * (several - 1) // 2
