"""vLLM's sampler on the policy's distributions, with the log-probs that the learner computes."""

from __future__ import annotations

from typing import Any

import torch
from qarl_kernels.truncation import Distribution
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from qarl.rollout.vllm.exact.model import ExactModel


class PolicySampler(Sampler):
    """Samples with each request's own noise from logits that are truncated already.

    Of vLLM's sampling parameters it reads the seeds and whether sampling is greedy. The truncation is the same for all
    requests of a call: `ExactModel.truncation`.
    """

    def __init__(self, policy: ExactModel) -> None:
        super().__init__("raw_logprobs")
        self._policy = policy
        self._scored: Distribution | None = None

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *rest: Any, **options: Any) -> SamplerOutput:
        """logits: (R, V) float32 of `ExactModel.compute_logits`."""
        return self.draw(logits, None if sampling_metadata.all_greedy else sampling_metadata.generators)

    def draw(self, logits: Tensor, generators: dict[int, torch.Generator] | None) -> SamplerOutput:
        """One token per row. generators: by row; None: take the most likely token."""
        drawn_from = self._policy.take(logits)
        if generators is None:
            tokens = logits.argmax(-1)
        else:
            tokens, _ = self.topk_topp_sampler(logits, generators, None, None)
        tokens = tokens.long()
        return SamplerOutput(tokens.int()[:, None], _reported(drawn_from, tokens))

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """Called for prompt tokens; `gather_logprobs` follows with the same rows."""
        self._scored = self._policy.take(logits)
        return logits

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        assert num_logprobs == 0, "qarl asks only for the log-probs of given tokens"
        scored, self._scored = self._scored, None
        assert scored is not None and scored.logits is logprobs
        return _reported(scored, token_ids)


def _reported(drawn_from: Distribution, tokens: Tensor) -> LogprobsTensors:
    """tokens: (R,) int64. Ranks are zeros: nothing reads them."""
    return LogprobsTensors(
        tokens.int()[:, None],
        drawn_from.logprobs(tokens)[:, None],
        torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device),
    )
