"""Floating-point operations that a model needs: its products and attention, and nothing done twice. No torch."""

from __future__ import annotations

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


def forward_flops(shape: Shape, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> float:
    """Of the log-probs of responses, as `Policy.logprobs` packs them: neighbours with the same prompt share it.

    2 for each weight of a linear layer that a token goes through, 2 for each weight of the output layer and response
    token, and 4 x heads x head size for each pair of a query and a key that it sees.
    """
    tokens = predicted = pairs = 0
    before: Sequence[int] | None = None
    for prompt, response in zip(prompts, responses, strict=True):
        known, run = len(prompt), len(response) - 1  # the last token of a response predicts nothing
        if prompt != before:
            tokens += known
            pairs += known * (known + 1) // 2
            before = prompt
        tokens += run
        predicted += len(response)
        pairs += run * known + run * (run + 1) // 2
    linears = 2.0 * shape.multiplied_parameters * tokens
    head = 2.0 * shape.vocab_size * shape.hidden_size * predicted
    return linears + head + 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
