"""Steps in plain torch, for the CPU. Tokens are on the host when a step returns."""

from __future__ import annotations

import torch
from qarl_kernels.logprob import log_probs_of
from torch import Tensor

from qarl.rollout.native.scheduler import Chunk
from qarl.rollout.native.steps import LOGIT_ROWS, Computed, Runner, StepOutput, rows_to_sample

# Tokens outside the truncated set keep a probability of exp(-50) = 2e-22 relative to the likeliest token. Sampling
# starts above the sum of half a million of them; this takes less of the distribution than one step of a uniform number.
FIRST_POINT = 1e-16


def sample_tokens(log_probs: Tensor, points: list[float]) -> Tensor:
    """Sample token ids (R,) by inverting the cumulative distribution of each row in float64, in order of token id.

    log_probs: (R, V) float32; a row with NaN gives the last token. points: R numbers in [0, 1].
    """
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    scaled = torch.tensor(points, dtype=torch.float64, device=log_probs.device)[:, None] * total
    # At most one step below the total, so that the result has a nonzero probability.
    scaled = scaled.clamp_(min=FIRST_POINT).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, scaled, right=True)[:, 0].clamp_(max=log_probs.shape[-1] - 1)


class PlainRunner(Runner):
    """Runs steps in plain torch."""

    def step(self, chunks: list[Chunk], computed: Computed) -> StepOutput:
        hidden, experts = self.forward(chunks)
        routing = [] if experts is None else [(chunks, experts.cpu())]
        sequences, rows = rows_to_sample(chunks, computed)
        tokens, logprobs = [torch.empty(0, dtype=torch.int64)], [torch.empty(0)]
        for start in range(0, len(sequences), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            points = [float(s.points[s.sampled]) for s in sequences[part]]
            sampled = self._sample(hidden, rows[part], points)
            tokens.append(sampled[0].cpu())
            logprobs.append(sampled[1].cpu())
        return StepOutput(sequences, range(len(sequences)), torch.cat(tokens), torch.cat(logprobs), routing)

    def _sample(self, hidden: Tensor, rows: list[int], points: list[float]) -> tuple[Tensor, Tensor]:
        """Sample a token per point from the state in its row of `hidden` (T, H); return tokens and log-probs."""
        distinct = list(dict.fromkeys(rows))
        log_probs = log_probs_of(self.sampler.logits(hidden[distinct]), self.truncation)
        if len(distinct) < len(rows):
            place = {row: i for i, row in enumerate(distinct)}
            log_probs = log_probs[[place[row] for row in rows]]
        chosen = log_probs.argmax(-1) if self.truncation.greedy else sample_tokens(log_probs, points)
        return chosen, log_probs.gather(-1, chosen[:, None])[:, 0]
