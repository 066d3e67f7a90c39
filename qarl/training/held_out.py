"""Loss of the served policy on held-out examples during a run, and its divergence from the teacher."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from qarl_kernels.logprob import Truncation

from qarl.batch.micro_batches import Response, by_tokens
from qarl.config import Config
from qarl.distributed.ranks import Ranks
from qarl.policy.teacher import Comparison, Teacher
from qarl.types import Prompt

if TYPE_CHECKING:
    from qarl.policy.policy import Policy


class HeldOut:
    """Scores examples with the policy as a sampler would serve it: the current version in the sampler's arithmetic.

    Args:
        examples: Prompts with responses.
        policy: The policy.
        config: The run's configuration; its micro-batch size and logprob_chunk are used.
        ranks: Ranks of the run. Each scores its share.
        teacher: Teacher to compare with, if any.

    Attributes:
        fingerprint: SHA-256 of the examples and the teacher's digest.
    """

    def __init__(
        self, examples: Sequence[Prompt], policy: Policy, config: Config, ranks: Ranks, teacher: Teacher | None
    ) -> None:
        self.examples, self.policy, self.ranks, self.teacher = examples, policy, ranks, teacher
        teacher_digest = None if teacher is None else teacher.sha256
        content = [[prompt.token_ids, prompt.response] for prompt in examples], teacher_digest
        self.fingerprint = hashlib.sha256(repr(content).encode()).hexdigest()
        self._tokens, self._chunk = config.train.micro_batch_tokens or 1, config.train.logprob_chunk or 1

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Score the examples. A collective.

        Returns:
            loss              mean over tokens, nats
            perplexity        exp(loss)
            tokens            number of tokens scored
            divergence        mean divergence from the teacher per token, if there is one
            top1_agreement    fraction of tokens at which policy and teacher prefer the same token, if there is one
        """
        sums = torch.zeros(4, dtype=torch.float64)
        own = self.ranks.share(len(self.examples))
        for part in self._batches([self.examples[index] for index in own]):
            sums += self._sums(part)
        every = self.ranks.gather(sums.tolist())
        loss, divergence, agreed, tokens = (sum(column) for column in zip(*every, strict=True))
        found = {"loss": loss / tokens, "perplexity": math.exp(min(loss / tokens, 700.0)), "tokens": tokens}
        if self.teacher is not None:
            found |= {"divergence": divergence / tokens, "top1_agreement": agreed / tokens}
        return found

    def _sums(self, part: list[Prompt]) -> torch.Tensor:
        """Return the sums of loss, divergence and agreement, and the number of tokens: (4,) float64 on the CPU."""
        given = [prompt.response for prompt in part if prompt.response is not None]
        written = [each.written or [True] * len(each.token_ids) for each in given]
        inputs = [prompt.token_ids for prompt in part], [each.token_ids for each in given], Truncation(), self._chunk
        comparison = None if self.teacher is None else Comparison(self.teacher)
        weights = self.policy.shadow
        logp, _ = self.policy.logprobs(*inputs, weights=weights, written=written, comparison=comparison)
        sums = torch.zeros(4, dtype=torch.float64, device=logp.device)
        sums[0], sums[3] = -logp.double().sum(), logp.numel()
        if comparison is not None and comparison.value is not None and comparison.agrees is not None:
            sums[1], sums[2] = comparison.value.double().sum(), comparison.agrees.double().sum()
        return sums.cpu()

    def _batches(self, examples: list[Prompt]) -> Iterator[list[Prompt]]:
        """Split into batches of up to `train.micro_batch_tokens` tokens, with at least one example each."""
        sizes = [
            Response(index, len(example.token_ids), len(example.response.token_ids))
            for index, example in enumerate(examples)
            if example.response is not None
        ]
        for start, end in pairwise([0, *by_tokens(sizes, self._tokens)]):
            yield examples[start:end]
