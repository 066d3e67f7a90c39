"""From token values to one number: where the length of a response enters the objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from qarl.objectives.segments import Segments

Aggregation = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


class Totals(NamedTuple):
    """The sizes of the whole minibatch, over all its micro-batches.

    total_responses: responses, empty ones included. total_tokens: response tokens. max_tokens: the constant that
    `seq-mean-token-sum-norm` divides by, the run's max_response_length.
    """

    total_responses: int
    total_tokens: int
    max_tokens: int


def aggregate(
    value: Tensor,  # (T,) of one micro-batch
    segments: Segments,
    mode: Aggregation,
    total_responses: int,
    total_tokens: int,
    max_tokens: int,
) -> Tensor:
    """The micro-batch's share of the minibatch's objective: a scalar, to maximise.

    seq-mean-token-mean      mean over responses of the mean over tokens     (GRPO)
    token-mean               mean over all tokens of the minibatch           (DAPO)
    seq-mean-token-sum       mean over responses of the sum over tokens
    seq-mean-token-sum-norm  the same, divided by the constant max_tokens    (Dr. GRPO)

    Each token is divided by its own constant, so the gradient of a token is bit-equal however the minibatch is cut,
    and the shares of the micro-batches add up to the minibatch. A part without tokens gives 0, attached to the graph.
    """
    if mode == "seq-mean-token-mean":
        return (value / (segments.expand(segments.lengths) * total_responses)).sum()
    if mode == "token-mean":
        return (value / total_tokens).sum()
    if mode == "seq-mean-token-sum":
        return (value / total_responses).sum()
    assert mode == "seq-mean-token-sum-norm", f"unknown aggregation {mode!r}"
    return (value / (total_responses * max_tokens)).sum()
