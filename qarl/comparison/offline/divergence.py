"""How far a scheme's next-token distributions are from those of bf16, and what that costs in perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qarl.comparison.intervals import mean_interval
from qarl.comparison.offline.windows import Windows
from qarl.errors import UserError
from qarl.policy.policy import Policy

LOGIT_BYTES = 64 * 2**20  # of one float64 chunk of logits; a handful are held at once


@torch.no_grad()
def final_states(policy: Policy, windows: Windows) -> Tensor:
    """States before each predicted token, in the sampler's arithmetic: (windows, predictions, H) on the CPU.

    What `Sampler.logits` makes of them is the whole distribution, so these are all that needs keeping of a reference.
    """
    kept = []
    for ids in windows.ids:
        hidden = policy.sampler.states([ids])
        kept.append(hidden[len(ids) - 1 - windows.predictions : -1].cpu())
    return torch.stack(kept)


@dataclass(frozen=True)
class TokenNumbers:
    """Per window and predicted token, float64 (windows, predictions), in nats.

    kl: KL(reference || scheme) over the whole vocabulary. nll, reference_nll: -log p of the token that follows.
    agrees: bool, whether both have the same likeliest token.
    """

    kl: Tensor
    nll: Tensor
    reference_nll: Tensor
    agrees: Tensor

    def summary(self) -> dict[str, Any]:
        """Numbers of comparison.json; intervals are over windows."""
        kl, low, high = mean_interval(self.kl.mean(1).tolist())
        agreement = mean_interval(self.agrees.double().mean(1).tolist())
        # The same tokens under both: the difference is far surer than either perplexity.
        increase = mean_interval((self.nll - self.reference_nll).mean(1).tolist())
        flat = self.kl.flatten()
        return {
            "kl": {
                "mean": kl,
                "low": None if low is None else max(0.0, low),
                "high": high,
                "median": flat.quantile(0.5).item(),
                "p99": flat.quantile(0.99).item(),
                "max": flat.max().item(),
            },
            "top1_agreement": _named(agreement, lambda share: min(1.0, max(0.0, share))),
            "perplexity": _named(mean_interval(self.nll.mean(1).tolist()), _exp),
            "perplexity_ratio": _named(increase, _exp),
        }


@torch.no_grad()
def token_numbers(policy: Policy, states: Tensor, reference: Tensor, windows: Windows) -> TokenNumbers:
    """Compare the distributions that `states` stand for with those of `reference`, both (windows, predictions, H).

    Both go through the policy's output layer: no scheme quantizes it, so it is the reference's as well. The softmax and
    the sums over the vocabulary are in float64, so that a divergence of zero comes out as zero.
    Raises UserError where a log-prob is not finite.
    """
    device = policy.device
    chunk = max(1, LOGIT_BYTES // (8 * policy.sampler.weights.head.shape[0]))
    columns: list[list[Tensor]] = [[], [], [], []]
    targets = torch.tensor([ids[-windows.predictions :] for ids in windows.ids])
    flat_states, flat_reference, flat_targets = states.flatten(0, 1), reference.flatten(0, 1), targets.flatten()
    for start in range(0, len(flat_targets), chunk):
        part = slice(start, start + chunk)
        p = policy.sampler.logits(flat_reference[part].to(device)).double().log_softmax(-1)
        q = policy.sampler.logits(flat_states[part].to(device)).double().log_softmax(-1)
        following = flat_targets[part].to(device)[:, None]
        # A divergence is not negative; only float64 rounding of the sum is.
        divergence = (p.exp() * (p - q)).sum(-1).clamp_(min=0.0)
        likely, reference_likely = (rows.gather(-1, following)[:, 0] for rows in (q, p))
        found = (divergence, -likely, -reference_likely, p.argmax(-1) == q.argmax(-1))
        for column, values in zip(columns, found, strict=True):
            column.append(values.cpu())
    numbers = TokenNumbers(*(torch.cat(column).view(targets.shape) for column in columns))
    if not (numbers.kl.isfinite().all() and numbers.nll.isfinite().all()):
        raise UserError("its log-probs on the text are not finite; a model.dtype with more range may hold them")
    return numbers


def _named(values: Sequence[float | None], of: Callable[[float], float | None]) -> dict[str, float | None]:
    return {
        name: None if value is None else of(value) for name, value in zip(("mean", "low", "high"), values, strict=True)
    }


def _exp(x: float) -> float | None:
    """e^x, None where float64 has no room for it (the end of an interval over very few windows)."""
    return math.exp(x) if x < 700 else None
