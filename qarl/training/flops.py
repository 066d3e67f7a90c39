"""Model FLOPs: matrix products and attention, without recomputation. Does not import torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qarl.config.architecture import Architecture

BACKWARD = 2  # relative to the forward: each product has an input gradient and a weight gradient


def forward_flops(
    shape: Architecture,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    windows: Sequence[int | None] | None = None,
) -> float:
    """Count the FLOPs of a forward that computes the log-probs of responses.

    Responses are packed as in `Policy.logprobs`: adjacent responses with equal prompts share one prompt. The count is 2
    per linear weight and token, plus 2 per output-layer weight and response token, plus 4 x heads x head size per
    visible (query, key) pair.

    Args:
        shape: Sizes of the model.
        prompts: Token ids of the prompt, per response.
        responses: Token ids, per response.
        windows: Attention window in tokens per layer; an entry of None means full attention. Default: full attention in
            all layers.

    Returns:
        FLOPs of the forward. The backward takes `BACKWARD` times as many.
    """
    predicted = 0
    runs: list[tuple[int, int]] = []  # runs of consecutive queries: (number of tokens before the run, of queries)
    before: Sequence[int] | None = None
    for prompt, response in zip(prompts, responses, strict=True):
        if prompt != before:
            runs.append((0, len(prompt)))
            before = prompt
        runs.append((len(prompt), len(response) - 1))  # the last token of a response is not an input
        predicted += len(response)
    linears = 2.0 * shape.multiplied_parameters * sum(count for _, count in runs)
    head = 2.0 * shape.vocab_size * shape.hidden_size * predicted
    layers = Counter(windows or [None] * shape.num_layers)
    pairs = sum(count * sum(_pairs(*run, window) for run in runs) for window, count in layers.items())
    return linears + head + 4.0 * shape.num_heads * shape.head_dim * pairs


def _pairs(first: int, count: int, window: int | None) -> int:
    """Count visible (query, key) pairs of `count` queries after `first` tokens; a query sees at most `window` keys."""
    seen = count * first + count * (count + 1) // 2  # without a window
    hidden = 0 if window is None else first + count - window  # keys that the last query's window excludes
    if hidden <= 0:
        return seen
    several = min(count, hidden)  # queries that do not see all earlier keys; each misses one more than the previous
    return seen - several * hidden + several * (several - 1) // 2
