"""Engine steps in plain torch, for the CPU. A step returns when its tokens are on the host."""

from __future__ import annotations

import torch
from qarl_kernels.logprob import log_probs_of
from torch import Tensor

from qarl.rollout.native.scheduler import Chunk
from qarl.rollout.native.steps import LOGIT_ROWS, Computed, Runner, StepOutput, rows_to_sample

# Lower bound of the cumulative probability that is inverted. Tokens removed by truncation keep exp(-50) = 2e-22 of the
# likeliest token's probability. The bound exceeds the sum of half a million of them, so that none of them is sampled in
# front of the first kept token, and it is below 2^-53, the spacing of the uniform numbers.
FIRST_POINT = 1e-16


def sample_tokens(log_probs: Tensor, points: list[float]) -> Tensor:
    """Sample one token id per row by inverting the row's cumulative distribution, in float64 and in order of token id.

    Args:
        log_probs: (R, V) float32. A row with NaN gives the last token.
        points: R uniform random numbers in [0, 1].

    Returns:
        (R,) int64.
    """
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    scaled = torch.tensor(points, dtype=torch.float64, device=log_probs.device)[:, None] * total
    # At most one step below the total, so that the result has a nonzero probability.
    scaled = scaled.clamp_(min=FIRST_POINT).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, scaled, right=True)[:, 0].clamp_(max=log_probs.shape[-1] - 1)


class PlainRunner(Runner):
    """See `Runner`."""

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
        """Sample R tokens, each from hidden[row] and with its point. Returns token ids and log-probs, (R,) each.

        hidden: (T, H). rows, points: R each; a row may occur several times.
        """
        distinct = list(dict.fromkeys(rows))
        log_probs = log_probs_of(self.sampler.logits(hidden[distinct]), self.truncation)
        if len(distinct) < len(rows):
            index = {row: i for i, row in enumerate(distinct)}
            log_probs = log_probs[[index[row] for row in rows]]
        chosen = log_probs.argmax(-1) if self.truncation.greedy else sample_tokens(log_probs, points)
        return chosen, log_probs.gather(-1, chosen[:, None])[:, 0]
