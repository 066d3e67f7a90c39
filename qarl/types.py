"""What flows between data, sampler, rewards and learner. Plain data; torch is not loaded for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One row of the data, ready for the sampler.

    id: position of the row in the source (stable across shuffling and resumption).
    token_ids: the prompt as the sampler sees it, chat template included.
    text: the same, as text. columns: the row's other columns (`answer`, ...), passed to the rewards.
    """

    id: int
    token_ids: list[int]
    text: str
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """One sampled response.

    prompt_id: the `Prompt.id` it answers. sample: which response to that prompt; where a step has a prompt twice, its
    second n responses are n to 2n - 1.
    token_ids: response tokens, the stop token included. logprobs: the sampler's natural-log probability of each
    token, after temperature and truncation, as float32 values; same length as token_ids.
    finish_reason: `stop` (a stop token or string) or `length`. version: of the policy that drew it.
    seed: of the random stream. text: the response without special tokens and without the stop string.
    routing: the experts that its tokens went through, where an engine was asked for them (`SamplingParams`), None
    otherwise: (prompt + response - 1, L, k), as `qarl.policy.routes.stored` makes it; the last token predicts nothing.
    """

    prompt_id: int
    sample: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    version: int
    seed: int
    text: str
    routing: Tensor | None = field(default=None, compare=False)
